#include "data/jinja.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <optional>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::data::jinja {
namespace {

constexpr int kMaxDepth = 100;  // of blocks and expressions in each other
constexpr int kMaxTree = 300;   // of an expression's tree: a chain of operators leans to the left

bool space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool word_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// A stretch of source: plain text, or what stands in {{ }} or {% %}.
struct Piece {
  enum class Kind { kText, kPrint, kBlock };
  Kind kind;
  std::string text;
  std::int64_t line;
};

/// Cuts source into pieces, white space between them trimmed as the marks ask.
class Cutter {
 public:
  explicit Cutter(std::string_view source) : source_(source) {
    if (source_.ends_with('\n')) source_.remove_suffix(1);
  }

  std::vector<Piece> cut() {
    while (at_ < source_.size()) {
      const std::size_t open = next_open();
      text(source_.substr(at_, open - at_), open);
      at_ = open;
      if (open < source_.size()) mark();
    }
    return std::move(pieces_);
  }

 private:
  std::size_t next_open() const {
    for (std::size_t i = at_; i + 1 < source_.size(); ++i) {
      if (source_[i] == '{' && std::string_view("{%#").find(source_[i + 1]) != std::string::npos) {
        return i;
      }
    }
    return source_.size();
  }

  void text(std::string_view text, std::size_t open) {
    if (trim_left_) {
      while (!text.empty() && space(text.front())) text.remove_prefix(1);
    } else if (after_block_ && text.starts_with('\n')) {
      text.remove_prefix(1);  // trim_blocks
    }
    const std::string_view mark = source_.substr(open, 3);
    if (mark.size() == 3 && mark[2] == '-') {
      while (!text.empty() && space(text.back())) text.remove_suffix(1);
    } else if (mark.size() >= 2 && mark[1] != '{' && !(mark.size() == 3 && mark[2] == '+')) {
      // lstrip_blocks: a block alone in its line so far takes the line's indentation
      std::size_t end = text.size();
      while (end > 0 && (text[end - 1] == ' ' || text[end - 1] == '\t')) --end;
      const bool from_line_start = end == 0 ? line_start_ : text[end - 1] == '\n';
      if (from_line_start) text = text.substr(0, end);
    }
    if (!text.empty()) pieces_.push_back({Piece::Kind::kText, std::string(text), line_});
    line_ += std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                        source_.begin() + static_cast<std::ptrdiff_t>(open), '\n');
  }

  void mark() {
    const char kind = source_[at_ + 1];
    const std::string_view closing = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
    const std::size_t first = at_ + 2;
    const std::size_t close = find_close(first, closing, kind == '#');
    std::string_view inside = source_.substr(first, close - first);
    const std::int64_t line = line_;
    line_ += std::count(inside.begin(), inside.end(), '\n');
    if (inside.starts_with('-') || inside.starts_with('+')) inside.remove_prefix(1);
    trim_left_ = inside.ends_with('-');
    if (trim_left_) inside.remove_suffix(1);
    after_block_ = kind != '{';
    at_ = close + 2;
    line_start_ = after_block_ && at_ < source_.size() && source_[at_] == '\n';
    if (kind == '#') return;
    const auto piece = kind == '{' ? Piece::Kind::kPrint : Piece::Kind::kBlock;
    pieces_.push_back({piece, std::string(inside), line});
  }

  std::size_t find_close(std::size_t from, std::string_view closing, bool comment) const {
    char quote = 0;
    for (std::size_t i = from; i + 1 < source_.size(); ++i) {
      const char c = source_[i];
      if (!comment && quote) {
        if (c == '\\') ++i;
        if (c == quote) quote = 0;
      } else if (!comment && (c == '\'' || c == '"')) {
        quote = c;
      } else if (source_.substr(i, 2) == closing) {
        return i;
      }
    }
    throw Error(cat({"line ", line_, ": ", source_.substr(at_, 2), " is not closed"}));
  }

  std::string_view source_;
  std::size_t at_ = 0;
  std::int64_t line_ = 1;
  bool trim_left_ = false;
  bool after_block_ = false;
  bool line_start_ = true;
  std::vector<Piece> pieces_;
};

struct Lexeme {
  enum class Kind { kWord, kString, kInteger, kSign, kEnd };
  Kind kind = Kind::kEnd;
  std::string text{};
};

std::string unescape(std::string_view quoted) {
  std::string out;
  for (std::size_t i = 0; i < quoted.size(); ++i) {
    if (quoted[i] != '\\' || i + 1 == quoted.size()) {
      out += quoted[i];
      continue;
    }
    const char c = quoted[++i];
    switch (c) {
      case 'n': out += '\n'; break;
      case 't': out += '\t'; break;
      case 'r': out += '\r'; break;
      case '\\':
      case '\'':
      case '"': out += c; break;
      default: throw Error(cat({"the escape \\", c, " is not implemented"}));
    }
  }
  return out;
}

std::vector<Lexeme> lex(std::string_view text) {
  constexpr std::array<std::string_view, 4> kPairs = {"==", "!=", "<=", ">="};
  std::vector<Lexeme> lexemes;
  while (true) {
    while (!text.empty() && space(text.front())) text.remove_prefix(1);
    if (text.empty()) break;
    const char c = text.front();
    std::size_t n = 1;
    auto kind = Lexeme::Kind::kSign;
    if (word_char(c)) {
      while (n < text.size() && word_char(text[n])) ++n;
      kind = std::isdigit(static_cast<unsigned char>(c)) ? Lexeme::Kind::kInteger
                                                         : Lexeme::Kind::kWord;
    } else if (c == '\'' || c == '"') {
      while (n < text.size() && text[n] != c) n += text[n] == '\\' ? 2 : 1;
      if (n >= text.size()) throw Error("a string is not closed");
      lexemes.push_back({Lexeme::Kind::kString, unescape(text.substr(1, n - 1))});
      text.remove_prefix(n + 1);
      continue;
    } else if (std::find(kPairs.begin(), kPairs.end(), text.substr(0, 2)) != kPairs.end()) {
      n = 2;
    }
    lexemes.push_back({kind, std::string(text.substr(0, n))});
    text.remove_prefix(n);
  }
  lexemes.emplace_back();
  return lexemes;
}

/// Reads expressions, loosest binding first.
class ExprParser {
 public:
  explicit ExprParser(std::string_view text) : lexemes_(lex(text)) {}

  bool at_end() const { return peek().kind == Lexeme::Kind::kEnd; }
  const Lexeme& peek() const { return lexemes_[at_]; }

  bool take(std::string_view text) {
    const bool is = peek().text == text &&
                    (peek().kind == Lexeme::Kind::kSign || peek().kind == Lexeme::Kind::kWord);
    if (is) ++at_;
    return is;
  }

  void expect(std::string_view text) {
    if (!take(text)) throw Error(cat({"\"", text, "\" is expected, not \"", peek().text, "\""}));
  }

  std::string word() {
    if (peek().kind != Lexeme::Kind::kWord) {
      throw Error(cat({"a name is expected, not \"", peek().text, "\""}));
    }
    return lexemes_[at_++].text;
  }

  void end() const {
    if (!at_end()) throw Error(cat({"\"", peek().text, "\" is not implemented here"}));
  }

  ExprPtr expression() {
    if (++depth_ > kMaxDepth) throw Error("expressions are nested too deeply");
    ExprPtr value = disjunction();
    if (take("if")) {
      ExprPtr condition = disjunction();
      ExprPtr other = take("else") ? expression() : nullptr;
      value = make(Expr::Kind::kTernary, "", std::move(value), std::move(condition));
      add(*value, std::move(other));
    }
    --depth_;
    return value;
  }

 private:
  template <typename... Args>
  static ExprPtr make(Expr::Kind kind, std::string text, Args... args) {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->text = std::move(text);
    (add(*expr, std::move(args)), ...);
    return expr;
  }

  /// Evaluating a tree and freeing it go down it by calls, so its depth has an end.
  static void add(Expr& to, ExprPtr arg) {
    if (arg) to.depth = std::max(to.depth, arg->depth + 1);
    to.args.push_back(std::move(arg));
    if (to.depth > kMaxTree) {
      throw Error(cat({"an expression's tree is deeper than ", kMaxTree, ", which is too deep"}));
    }
  }

  ExprPtr disjunction() {
    ExprPtr left = conjunction();
    while (take("or")) left = make(Expr::Kind::kBinary, "or", std::move(left), conjunction());
    return left;
  }

  ExprPtr conjunction() {
    ExprPtr left = negation();
    while (take("and")) left = make(Expr::Kind::kBinary, "and", std::move(left), negation());
    return left;
  }

  ExprPtr negation() {
    if (!take("not")) return comparison();
    if (++depth_ > kMaxDepth) throw Error("expressions are nested too deeply");
    ExprPtr value = make(Expr::Kind::kNot, "", negation());
    --depth_;
    return value;
  }

  ExprPtr comparison() {
    ExprPtr left = sum();
    while (true) {
      const std::string sign = peek().text;
      if (peek().kind == Lexeme::Kind::kSign && (sign == "==" || sign == "!=" || sign == "<" ||
                                                 sign == ">" || sign == "<=" || sign == ">=")) {
        ++at_;
        left = make(Expr::Kind::kBinary, sign, std::move(left), sum());
      } else if (take("in")) {
        left = make(Expr::Kind::kBinary, "in", std::move(left), sum());
      } else if (peek().text == "not" && lexemes_[at_ + 1].text == "in") {
        at_ += 2;
        left = make(Expr::Kind::kNot, "", make(Expr::Kind::kBinary, "in", std::move(left), sum()));
      } else {
        return left;
      }
    }
  }

  ExprPtr sum() {
    ExprPtr left = unary();
    while (peek().kind == Lexeme::Kind::kSign &&
           (peek().text == "+" || peek().text == "-" || peek().text == "~")) {
      const std::string sign = lexemes_[at_++].text;
      left = make(Expr::Kind::kBinary, sign, std::move(left), unary());
    }
    return left;
  }

  ExprPtr unary() {
    if (!take("-")) return postfix();
    if (++depth_ > kMaxDepth) throw Error("expressions are nested too deeply");
    ExprPtr value = make(Expr::Kind::kNegative, "", unary());
    --depth_;
    return value;
  }

  ExprPtr postfix() {
    ExprPtr value = primary();
    while (true) {
      if (take(".")) {
        const std::string name = word();
        if (take("(")) {
          value = make(Expr::Kind::kMethod, name, std::move(value));
          arguments(*value);
        } else {
          value = make(Expr::Kind::kAttribute, name, std::move(value));
        }
      } else if (take("[")) {
        value = subscript(std::move(value));
      } else if (take("|")) {
        value = make(Expr::Kind::kFilter, word(), std::move(value));
        if (take("(")) arguments(*value);
      } else if (take("is")) {
        const bool negated = take("not");
        value = make(Expr::Kind::kTest, word(), std::move(value));
        if (negated) value = make(Expr::Kind::kNot, "", std::move(value));
      } else {
        return value;
      }
    }
  }

  ExprPtr subscript(ExprPtr value) {
    std::vector<ExprPtr> parts;
    bool slice = false;
    ExprPtr part;
    while (!take("]")) {
      if (take(":")) {
        slice = true;
        parts.push_back(std::move(part));
        part = nullptr;
      } else if (part) {
        throw Error(cat({"\"]\" is expected, not \"", peek().text, "\""}));
      } else {
        part = expression();
      }
    }
    parts.push_back(std::move(part));
    if (!slice && !parts[0]) throw Error("an index is missing");
    if (parts.size() > 3) throw Error("a slice has three parts at most");
    ExprPtr result = make(slice ? Expr::Kind::kSlice : Expr::Kind::kIndex, "", std::move(value));
    for (ExprPtr& each : parts) add(*result, std::move(each));
    if (slice) result->args.resize(4);
    return result;
  }

  void arguments(Expr& call) {
    call.names.resize(call.args.size());
    while (!take(")")) {
      const bool named = peek().kind == Lexeme::Kind::kWord && lexemes_[at_ + 1].text == "=" &&
                         lexemes_[at_ + 1].kind == Lexeme::Kind::kSign;
      call.names.push_back(named ? word() : "");
      if (named) expect("=");
      add(call, expression());
      if (!take(",") && peek().text != ")") {
        throw Error(cat({"\")\" is expected, not \"", peek().text, "\""}));
      }
    }
  }

  ExprPtr primary() {
    const Lexeme lexeme = peek();
    if (lexeme.kind != Lexeme::Kind::kEnd) ++at_;
    switch (lexeme.kind) {
      case Lexeme::Kind::kString: return make(Expr::Kind::kString, lexeme.text);
      case Lexeme::Kind::kInteger: return integer(lexeme.text);
      case Lexeme::Kind::kWord: return named(lexeme.text);
      default: break;
    }
    if (lexeme.text == "(") {
      ExprPtr value = expression();
      expect(")");
      return value;
    }
    if (lexeme.text == "[") {
      ExprPtr list = make(Expr::Kind::kList, "");
      while (!take("]")) {
        add(*list, expression());
        if (!take(",") && peek().text != "]") throw Error("a list is not closed");
      }
      return list;
    }
    throw Error(cat({"\"", lexeme.text, "\" is not implemented here"}));
  }

  static ExprPtr integer(const std::string& text) {
    ExprPtr value = make(Expr::Kind::kInteger, text);
    const char* end = text.data() + text.size();
    const auto [stop, failed] = std::from_chars(text.data(), end, value->integer);
    if (failed != std::errc() || stop != end) throw Error(cat({text, " is no whole number"}));
    return value;
  }

  ExprPtr named(std::string text) {
    if (take("(")) {
      ExprPtr call = make(Expr::Kind::kFunction, std::move(text));
      arguments(*call);
      return call;
    }
    std::string lower = text;
    lower[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(lower[0])));
    if (lower == "true" || lower == "false" || lower == "none") {
      return make(Expr::Kind::kConstant, lower);
    }
    return make(Expr::Kind::kName, std::move(text));
  }

  std::vector<Lexeme> lexemes_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

/// Reads pieces into nodes.
class BlockParser {
 public:
  explicit BlockParser(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  std::vector<Node> parse() {
    std::string closing;
    std::vector<Node> nodes = body(closing, 0);
    if (!closing.empty()) throw Error(cat({"{% ", closing, " %} closes nothing"}));
    return nodes;
  }

 private:
  /// Up to a block that this body does not open: its word is `closing`, its rest is in rest_.
  std::vector<Node> body(std::string& closing, int depth) {
    if (depth > kMaxDepth) throw Error("blocks are nested too deeply");
    std::vector<Node> nodes;
    while (at_ < pieces_.size()) {
      const Piece& piece = pieces_[at_++];
      try {
        if (piece.kind == Piece::Kind::kText) {
          nodes.push_back({.kind = Node::Kind::kText, .text = piece.text});
          continue;
        }
        ExprParser parser(piece.text);
        if (piece.kind == Piece::Kind::kPrint) {
          nodes.push_back({.kind = Node::Kind::kPrint, .expr = whole(parser)});
          continue;
        }
        const std::string word = parser.word();
        if (word == "set") {
          nodes.push_back(set(parser));
        } else if (word == "if") {
          nodes.push_back(condition(parser, depth));
        } else if (word == "for") {
          nodes.push_back(loop(parser, depth));
        } else if (word == "elif" || word == "else" || word == "endif" || word == "endfor") {
          closing = word;
          rest_.emplace(std::move(parser));
          return nodes;
        } else if (word != "generation" && word != "endgeneration") {
          throw Error(cat({"{% ", word, " %} is not implemented"}));
        }
      } catch (const Error& error) {
        const std::string_view what = error.what();
        if (what.starts_with("line ")) throw;
        throw Error(cat({"line ", piece.line, ": ", what}));
      }
    }
    closing.clear();
    return nodes;
  }

  static ExprPtr whole(ExprParser& parser) {
    ExprPtr expr = parser.expression();
    parser.end();
    return expr;
  }

  static Node set(ExprParser& parser) {
    Node node{.kind = Node::Kind::kSet, .text = parser.word()};
    if (parser.take(".")) node.attribute = parser.word();
    parser.expect("=");
    node.expr = whole(parser);
    return node;
  }

  Node condition(ExprParser& parser, int depth) {
    Node node{.kind = Node::Kind::kIf, .expr = whole(parser)};
    std::string closing;
    node.body = body(closing, depth + 1);
    if (closing == "elif") {
      ExprParser rest = std::move(*rest_);
      node.other.push_back(condition(rest, depth + 1));  // it takes the endif
      return node;
    }
    if (closing == "else") node.other = body(closing, depth + 1);
    if (closing != "endif") throw Error("{% if %} is not closed");
    return node;
  }

  Node loop(ExprParser& parser, int depth) {
    Node node{.kind = Node::Kind::kFor, .text = parser.word()};
    parser.expect("in");
    node.expr = whole(parser);
    std::string closing;
    node.body = body(closing, depth + 1);
    if (closing == "else") node.other = body(closing, depth + 1);
    if (closing != "endfor") throw Error("{% for %} is not closed");
    return node;
  }

  std::vector<Piece> pieces_;
  std::size_t at_ = 0;
  std::optional<ExprParser> rest_;
};

}  // namespace

std::vector<Node> parse(std::string_view source) {
  return BlockParser(Cutter(source).cut()).parse();
}

}  // namespace lockstep::data::jinja
