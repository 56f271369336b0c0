#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "data/jinja.h"

namespace lockstep::data::jinja {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxOutput = std::size_t{64} << 20;
constexpr int kMaxNested = 100;  // of lists and objects in each other

/// A value, or undefined.
using Value = std::optional<json>;

bool truthy(const Value& value) {
  if (!value || value->is_null()) return false;
  if (value->is_boolean()) return value->get<bool>();
  if (value->is_number()) return *value != 0;
  if (value->is_string()) return !value->get_ref<const std::string&>().empty();
  return !value->empty();
}

const std::string& string_of(const Value& value, std::string_view what) {
  if (!value || !value->is_string()) throw Error(cat({what, " wants a string"}));
  return value->get_ref<const std::string&>();
}

long long integer_of(const Value& value, std::string_view what) {
  if (!value || !value->is_number_integer()) throw Error(cat({what, " wants a whole number"}));
  return value->get<long long>();
}

std::string printed(const Value& value) {
  if (!value) return "";
  if (value->is_string()) return value->get<std::string>();
  if (value->is_number_integer()) return value->dump();
  if (value->is_boolean()) return value->get<bool>() ? "True" : "False";
  if (value->is_null()) return "None";
  throw Error("printing a list or an object is not implemented");
}

std::string strip(std::string_view text, std::string_view what, bool left, bool right) {
  const auto drop = [&](char c) {
    return what.empty() ? std::isspace(static_cast<unsigned char>(c)) != 0
                        : what.find(c) != std::string_view::npos;
  };
  while (left && !text.empty() && drop(text.front())) text.remove_prefix(1);
  while (right && !text.empty() && drop(text.back())) text.remove_suffix(1);
  return std::string(text);
}

json split(std::string_view text, std::string_view at) {
  if (at.empty()) throw Error("split without a separator is not implemented");
  json parts = json::array();
  while (true) {
    const std::size_t found = text.find(at);
    parts.push_back(std::string(text.substr(0, found)));
    if (found == std::string_view::npos) return parts;
    text.remove_prefix(found + at.size());
  }
}

bool deeper_than(const json& value, int limit) {
  if (!value.is_structured()) return false;
  if (limit == 0) return true;
  return std::any_of(value.begin(), value.end(),
                     [&](const json& part) { return deeper_than(part, limit - 1); });
}

/// Slices of a list, and of a string where all of it is ASCII, as Python cuts them.
Value slice(const json& of, const Value& first, const Value& last, const Value& step_value) {
  const bool is_text = of.is_string();
  if (!is_text && !of.is_array()) throw Error("a slice of what is no list and no string");
  const auto n =
      static_cast<long long>(is_text ? of.get_ref<const std::string&>().size() : of.size());
  if (is_text) {
    const auto& text = of.get_ref<const std::string&>();
    if (!std::all_of(text.begin(), text.end(), [](char c) { return c >= 0; })) {
      throw Error("a slice of a string beyond ASCII is not implemented");
    }
  }
  const long long step = step_value ? integer_of(step_value, "a slice") : 1;
  if (step != 1 && step != -1)
    throw Error("a slice in steps other than 1 and -1 is not implemented");
  const auto place = [&](const Value& value, long long absent) {
    if (!value || value->is_null()) return absent;
    long long at = integer_of(value, "a slice");
    if (at < 0) at += n;
    return step > 0 ? std::clamp(at, 0LL, n) : std::clamp(at, -1LL, n - 1);
  };
  const long long begin = place(first, step > 0 ? 0 : n - 1);
  const long long end = place(last, step > 0 ? n : -1);
  json list = json::array();
  std::string text;
  for (long long i = begin; step > 0 ? i < end : i > end; i += step) {
    const auto at = static_cast<std::size_t>(i);
    if (is_text) {
      text += of.get_ref<const std::string&>()[at];
    } else {
      list.push_back(of[at]);
    }
  }
  return is_text ? json(text) : list;
}

class Renderer {
 public:
  explicit Renderer(const std::map<std::string, json>& variables) : scopes_{variables} {}

  void run(const std::vector<Node>& nodes) {
    for (const Node& node : nodes) run(node);
  }

  std::string take() { return std::move(out_); }

 private:
  void run(const Node& node) {
    switch (node.kind) {
      case Node::Kind::kText: out_ += node.text; break;
      case Node::Kind::kPrint: out_ += printed(evaluate(*node.expr)); break;
      case Node::Kind::kSet: set(node); break;
      case Node::Kind::kIf: run(truthy(evaluate(*node.expr)) ? node.body : node.other); break;
      case Node::Kind::kFor: loop(node); break;
    }
    if (out_.size() > kMaxOutput) throw Error("the rendered text is too long");
  }

  void set(const Node& node) {
    Value value = evaluate(*node.expr);
    if (!value) throw Error(cat({"set ", node.text, ": the value is undefined"}));
    if (deeper_than(*value, kMaxNested)) {
      throw Error(cat({"set ", node.text, ": lists are nested deeper than ", kMaxNested}));
    }
    if (node.attribute.empty()) {
      scopes_.back()[node.text] = std::move(*value);
      return;
    }
    json* space = find(node.text);
    if (!space || !space->is_object()) {
      throw Error(cat({"set ", node.text, ".", node.attribute, ": is no namespace"}));
    }
    (*space)[node.attribute] = std::move(*value);
  }

  void loop(const Node& node) {
    const Value list = evaluate(*node.expr);
    if (!list || !list->is_array()) throw Error(cat({"for ", node.text, ": wants a list"}));
    if (list->empty()) return run(node.other);
    const std::size_t n = list->size();
    for (std::size_t i = 0; i < n; ++i) {
      json state = {
          {"index", i + 1}, {"index0", i}, {"first", i == 0}, {"last", i + 1 == n}, {"length", n}};
      if (i > 0) state["previtem"] = (*list)[i - 1];
      if (i + 1 < n) state["nextitem"] = (*list)[i + 1];
      scopes_.push_back({{node.text, (*list)[i]}, {"loop", std::move(state)}});
      run(node.body);
      scopes_.pop_back();
    }
  }

  json* find(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(name); found != scope->end()) return &found->second;
    }
    return nullptr;
  }

  Value optional(const ExprPtr& expr) { return expr ? evaluate(*expr) : std::nullopt; }

  Value evaluate(const Expr& expr) {
    using Kind = Expr::Kind;
    switch (expr.kind) {
      case Kind::kString: return json(expr.text);
      case Kind::kInteger: return json(expr.integer);
      case Kind::kConstant: return expr.text == "none" ? json(nullptr) : json(expr.text == "true");
      case Kind::kName: {
        const json* found = find(expr.text);
        return found ? Value(*found) : std::nullopt;
      }
      case Kind::kList: {
        json list = json::array();
        for (const ExprPtr& arg : expr.args) {
          Value value = evaluate(*arg);
          if (!value) throw Error("a list with an undefined value");
          list.push_back(std::move(*value));
        }
        return list;
      }
      case Kind::kAttribute: return attribute(evaluate(*expr.args[0]), expr.text);
      case Kind::kIndex: return index(evaluate(*expr.args[0]), evaluate(*expr.args[1]));
      case Kind::kSlice: {
        const Value of = evaluate(*expr.args[0]);
        if (!of) throw Error("a slice of an undefined value");
        return slice(*of, optional(expr.args[1]), optional(expr.args[2]), optional(expr.args[3]));
      }
      case Kind::kMethod: return method(expr);
      case Kind::kFunction: return function(expr);
      case Kind::kFilter: return filter(expr);
      case Kind::kTest: return json(test(evaluate(*expr.args[0]), expr.text));
      case Kind::kNot: return json(!truthy(evaluate(*expr.args[0])));
      case Kind::kNegative: return json(-integer_of(evaluate(*expr.args[0]), "-"));
      case Kind::kBinary: return binary(expr);
      case Kind::kTernary:
        return truthy(evaluate(*expr.args[1])) ? evaluate(*expr.args[0]) : optional(expr.args[2]);
    }
    return std::nullopt;
  }

  static Value attribute(const Value& of, const std::string& name) {
    if (!of) throw Error(cat({".", name, " of an undefined value"}));
    if (!of->is_object()) return std::nullopt;
    const auto found = of->find(name);
    return found == of->end() ? std::nullopt : Value(*found);
  }

  static Value index(const Value& of, const Value& at) {
    if (!of) throw Error("an index of an undefined value");
    if (at && at->is_string()) return attribute(of, at->get<std::string>());
    if (!of->is_array()) throw Error("an index of what is no list");
    long long i = integer_of(at, "an index");
    const auto n = static_cast<long long>(of->size());
    if (i < 0) i += n;
    if (i < 0 || i >= n) return std::nullopt;
    return (*of)[static_cast<std::size_t>(i)];
  }

  Value method(const Expr& expr) {
    const Value of = evaluate(*expr.args[0]);
    std::vector<std::string> args;
    for (std::size_t i = 1; i < expr.args.size(); ++i) {
      args.push_back(string_of(evaluate(*expr.args[i]), cat({".", expr.text, "()"})));
    }
    const std::string& name = expr.text;
    const auto is = [&](std::string_view known, std::size_t least, std::size_t most) {
      return name == known && args.size() >= least && args.size() <= most;
    };
    const std::string& text = string_of(of, cat({".", name, "()"}));
    const std::string first = args.empty() ? "" : args[0];
    if (is("startswith", 1, 1)) return json(text.starts_with(first));
    if (is("endswith", 1, 1)) return json(text.ends_with(first));
    if (is("split", 1, 1)) return split(text, first);
    if (is("strip", 0, 1)) return json(strip(text, first, true, true));
    if (is("lstrip", 0, 1)) return json(strip(text, first, true, false));
    if (is("rstrip", 0, 1)) return json(strip(text, first, false, true));
    throw Error(cat({".", name, "() with ", args.size(), " arguments is not implemented"}));
  }

  Value function(const Expr& expr) {
    if (expr.text == "raise_exception" && expr.args.size() == 1) {
      throw Error(
          cat({"the template refuses: ", string_of(evaluate(*expr.args[0]), "raise_exception")}));
    }
    if (expr.text == "namespace") {
      json space = json::object();
      for (std::size_t i = 0; i < expr.args.size(); ++i) {
        Value value = evaluate(*expr.args[i]);
        if (expr.names[i].empty() || !value) throw Error("namespace wants name=value");
        space[expr.names[i]] = std::move(*value);
      }
      return space;
    }
    throw Error(cat({expr.text, "() is not implemented"}));
  }

  Value filter(const Expr& expr) {
    const Value of = evaluate(*expr.args[0]);
    if (expr.args.size() == 1 && (expr.text == "length" || expr.text == "count")) {
      if (of && (of->is_array() || of->is_object())) return json(of->size());
      const std::string& text = string_of(of, "length");
      return json(
          std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
    }
    if (expr.args.size() == 1 && expr.text == "trim") {
      return json(strip(string_of(of, "trim"), "", true, true));
    }
    throw Error(cat({"the filter ", expr.text, " is not implemented"}));
  }

  static bool test(const Value& value, const std::string& name) {
    if (name == "defined") return value.has_value();
    if (name == "undefined") return !value.has_value();
    if (name == "none") return value && value->is_null();
    if (name == "string") return value && value->is_string();
    if (name == "mapping") return value && value->is_object();
    if (name == "true") return value && value->is_boolean() && value->get<bool>();
    if (name == "false") return value && value->is_boolean() && !value->get<bool>();
    if (name == "iterable" || name == "sequence") {
      return value && (value->is_string() || value->is_structured());
    }
    throw Error(cat({"the test ", name, " is not implemented"}));
  }

  Value binary(const Expr& expr) {
    const std::string& sign = expr.text;
    Value left = evaluate(*expr.args[0]);
    if (sign == "or") return truthy(left) ? left : evaluate(*expr.args[1]);
    if (sign == "and") return truthy(left) ? evaluate(*expr.args[1]) : left;
    Value right = evaluate(*expr.args[1]);
    if (sign == "==") return json(left == right);
    if (sign == "!=") return json(left != right);
    if (sign == "~") return json(printed(left) + printed(right));
    if (!left || !right) throw Error(cat({"\"", sign, "\" with an undefined value"}));
    if (sign == "in") return json(contains(*right, *left));
    if (sign == "+" && left->is_string() && right->is_string()) {
      return json(left->get_ref<const std::string&>() + right->get_ref<const std::string&>());
    }
    const long long a = integer_of(left, sign);
    const long long b = integer_of(right, sign);
    long long result = 0;
    if (sign == "<") return json(a < b);
    if (sign == ">") return json(a > b);
    if (sign == "<=") return json(a <= b);
    if (sign == ">=") return json(a >= b);
    const bool over =
        sign == "+" ? __builtin_add_overflow(a, b, &result) : __builtin_sub_overflow(a, b, &result);
    if (over) throw Error(cat({"\"", sign, "\" overflows"}));
    return json(result);
  }

  static bool contains(const json& whole, const json& part) {
    if (whole.is_string()) {
      return whole.get_ref<const std::string&>().find(string_of(part, "in")) != std::string::npos;
    }
    if (whole.is_object()) return whole.contains(string_of(part, "in"));
    if (!whole.is_array()) throw Error("\"in\" wants a string, a list or an object");
    return std::find(whole.begin(), whole.end(), part) != whole.end();
  }

  std::vector<std::map<std::string, json>> scopes_;
  std::string out_;
};

}  // namespace

std::string render(const std::vector<Node>& nodes, const std::map<std::string, json>& variables) {
  Renderer renderer(variables);
  renderer.run(nodes);
  return renderer.take();
}

}  // namespace lockstep::data::jinja
