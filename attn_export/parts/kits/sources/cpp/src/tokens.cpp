#include "tokens.h"

#include <algorithm>
#include <stdexcept>

#include "steps.h"

namespace attention {

namespace {

void check(const std::vector<std::int64_t>& prompt, std::int64_t count) {
    const Ids& ids = bundle().ids;
    const auto length = static_cast<std::int64_t>(prompt.size());
    if (ids.vocabulary == 0) throw std::invalid_argument("this bundle is no model that takes ids");
    if (prompt.empty()) throw std::invalid_argument("the prompt has no token");
    for (const std::int64_t id : prompt) {
        if (id >= 0 && id < ids.vocabulary) continue;
        throw std::invalid_argument("there is no token " + std::to_string(id) +
                                    "; ids are 0 to " + std::to_string(ids.vocabulary - 1));
    }
    if (count < 1 || count > ids.most || length > ids.most - count + 1) {
        throw std::invalid_argument(std::to_string(length) + " tokens and " + std::to_string(count) +
                                    " more: the bundle takes " + std::to_string(ids.most));
    }
}

}  // namespace

void generate(Graphs& graphs, const std::vector<std::int64_t>& prompt, std::int64_t count,
              const std::function<void(std::int64_t)>& each) {
    check(prompt, count);
    std::vector<std::int64_t> tokens = prompt;
    const Fill fill = [&](Tensor& tensor, const Step& step) {
        if (tensor.name() == "logit_index") {
            tensor.set(0, static_cast<double>(step.new_tokens - 1));
        } else {
            std::copy(tokens.begin(), tokens.end(), tensor.as<std::int64_t>());
        }
    };
    // The last token is not run.
    const auto length = static_cast<std::int64_t>(prompt.size());
    const std::int64_t capacity = length + count - 1;
    const Ids& ids = bundle().ids;
    std::vector<Tensor> inputs;
    for (std::int64_t made = 0; made < count; made++) {
        const std::int64_t held = made == 0 ? 0 : length + made - 1;
        const Step step{static_cast<std::int64_t>(tokens.size()), held, capacity};
        const std::vector<Tensor> outputs = run_step(graphs, step, fill, inputs);
        const Tensor* logits = find(outputs, "logits");
        if (logits == nullptr) throw std::runtime_error("the graph gives no logits");
        const std::int64_t next = largest(*logits, ids.vocabulary);
        each(next);
        if (std::find(ids.ends.begin(), ids.ends.end(), next) != ids.ends.end()) return;
        tokens = {next};
    }
}

}  // namespace attention
