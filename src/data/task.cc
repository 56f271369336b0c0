#include "data/task.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::data {

PromptId training_id(std::int64_t index) {
  if (index < 0 || index >= kFirstEvaluationId) {
    throw Usage(
        cat({"prompt ", index, " of a run: prompts are numbered from 0 to ", kFirstEvaluationId - 1,
             ", for their records' sake; lower schedule.steps or schedule.prompts"}));
  }
  return {index};
}

PromptId evaluation_id(std::int64_t index) {
  if (index < 0 || index >= kFirstEvaluationId) {
    throw Usage(cat({"prompt ", index, " of an evaluation: at most ", kFirstEvaluationId,
                     " are numbered; lower eval.prompts"}));
  }
  return {kFirstEvaluationId + index};
}

}  // namespace lockstep::data
