/// A part of the Jinja template language, for chat templates: read into a tree here, rendered in
/// jinja_render.cc. Blocks are trimmed as Transformers sets it (trim_blocks, lstrip_blocks).
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data::jinja {

struct Expr {
  enum class Kind {
    kString,
    kInteger,
    kConstant,   // text: true, false, none
    kName,       // text
    kList,       // args
    kAttribute,  // args[0] . text
    kIndex,      // args[0] [ args[1] ]
    kSlice,      // args[0] [ args[1] : args[2] : args[3] ], nullptr where left out
    kMethod,     // args[0] . text ( args[1..] )
    kFunction,   // text ( args ), names[i] where args[i] is given by name
    kFilter,     // args[0] | text ( args[1..] )
    kTest,       // args[0] is text
    kNot,
    kNegative,
    kBinary,   // args[0] text args[1]
    kTernary,  // args[0] if args[1] else args[2], which may be nullptr
  };
  Kind kind{};
  std::string text{};
  long long integer = 0;
  std::vector<std::unique_ptr<Expr>> args{};
  std::vector<std::string> names{};
  int depth = 1;  // of the tree below it, itself included
};
using ExprPtr = std::unique_ptr<Expr>;

struct Node {
  enum class Kind {
    kText,   // text
    kPrint,  // expr
    kSet,    // text, or text.attribute, = expr
    kIf,     // expr, body; other: what else holds
    kFor,    // text in expr; body; other: where there is nothing
  };
  Kind kind{};
  std::string text{};
  std::string attribute{};
  ExprPtr expr{};
  std::vector<Node> body{};
  std::vector<Node> other{};
};

/// Throws Error naming what is not implemented, with its line; so also where a chain of operators
/// or blocks in each other would make a tree too deep to walk.
std::vector<Node> parse(std::string_view source);

/// Throws Error naming what is not implemented, or what the template itself raised.
std::string render(const std::vector<Node>& nodes,
                   const std::map<std::string, nlohmann::json>& variables);

}  // namespace lockstep::data::jinja
