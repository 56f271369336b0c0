/// Tokenizers that tests need.
#pragma once

#include "data/tokenizer.h"

namespace lockstep::data {

/// Every byte a token, 256 and on "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>" (the
/// last is not special); "h"+"e" and the like merge where `merges`, a JSON list, says so.
Tokenizer byte_tokenizer(const std::string& merges = "[]", const std::string& more_vocabulary = "");

/// The JSON of it.
std::string byte_tokenizer_json(const std::string& merges = "[]",
                                const std::string& more_vocabulary = "");

}  // namespace lockstep::data
