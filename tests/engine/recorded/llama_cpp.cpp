// What llama.cpp's own samplers answer: prints the cases of llama_cpp.json.
//
//   cmake -B build llama.cpp && cmake --build build --target llama
//   g++ -O1 -std=c++17 -I llama.cpp/include -I llama.cpp/src -I llama.cpp/ggml/include llama_cpp.cpp \
//       build/src/libllama.a build/ggml/src/libggml*.a -fopenmp -ldl -o llama_cpp
//   ./llama_cpp > llama_cpp.json
//
// The llama.cpp is the one of llama-cpp-python 0.3.36.

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "llama.h"

llama_sampler * llama_sampler_init_dry_testing(
    float, float, int32_t, int32_t, const std::vector<std::vector<llama_token>> &);

using Sampler = llama_sampler *;

static const int VOCAB_SIZE = 110;
static std::mt19937 rng(5);
static bool first = true;

static std::vector<float> random_row(float spread) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> row(VOCAB_SIZE);
    for (float & logit : row) logit = std::round(normal(rng) * 10000) / 10000;
    return row;
}

template <typename T> static void print_list(const char * name, const std::vector<T> & values) {
    printf(", \"%s\": [", name);
    for (size_t i = 0; i < values.size(); ++i) printf("%s%.6g", i ? ", " : "", double(values[i]));
    printf("]");
}

// One step: the row, what is left of it, with which logits if these are others, and the token that was selected
// (-1: none is).
static void print_step(
        const std::string & options, Sampler sampler, const std::vector<float> & row, const std::vector<int> & history) {
    std::vector<llama_token_data> data;
    for (int id = 0; id < VOCAB_SIZE; ++id) data.push_back({id, row[id], 0.0f});
    llama_token_data_array candidates = {data.data(), data.size(), -1, false};
    llama_sampler_apply(sampler, &candidates);
    std::vector<int> ids;
    std::vector<float> left;
    bool changed = false;
    for (size_t i = 0; i < candidates.size; ++i) {
        if (candidates.data[i].logit == -INFINITY) continue;
        ids.push_back(candidates.data[i].id);
        left.push_back(candidates.data[i].logit);
        changed = changed || left.back() != row[ids.back()];
    }
    if (!changed) left.clear();
    printf("%s{\"options\": {%s}", first ? "[\n" : ",\n", options.c_str());
    first = false;
    print_list("history", history);
    print_list("row", row);
    print_list("ids", ids);
    print_list("left", left);
    printf(", \"selected\": %d}", candidates.selected < 0 ? -1 : candidates.data[candidates.selected].id);
}

static void alone(const std::string & options, Sampler sampler, float spread) {
    print_step(options, sampler, random_row(spread), {});
    llama_sampler_free(sampler);
}

static void after(const std::string & options, Sampler sampler, int num_kinds, int length) {
    std::vector<int> history;
    for (int i = 0; i < length; ++i) {
        history.push_back(i > 12 && rng() % 3 ? history[i - 11] : int(rng() % num_kinds));
        llama_sampler_accept(sampler, history.back());
    }
    print_step(options, sampler, random_row(2.0f), history);
    llama_sampler_free(sampler);
}

static void steps(const std::string & options, Sampler sampler, float spread) {
    for (int step = 0; step < 8; ++step) print_step(options, sampler, random_row(spread), {});
    llama_sampler_free(sampler);
}

static Sampler chain(const std::vector<Sampler> & samplers) {
    Sampler all = llama_sampler_chain_init(llama_sampler_chain_default_params());
    for (Sampler one : samplers) llama_sampler_chain_add(all, one);
    return all;
}

int main() {
    for (float spread : {0.5f, 2.0f, 5.0f}) {
        alone("\"temperature\": 0.9, \"dynatemp_range\": 0.5", llama_sampler_init_temp_ext(0.9f, 0.5f, 1.0f), spread);
        alone("\"temperature\": 0.7, \"dynatemp_range\": 1.2, \"dynatemp_exponent\": 2.5", llama_sampler_init_temp_ext(0.7f, 1.2f, 2.5f), spread);
        alone("\"xtc_probability\": 1.0, \"xtc_threshold\": 0.02", llama_sampler_init_xtc(1.0f, 0.02f, 1, 1), spread);
        alone("\"xtc_probability\": 1.0, \"xtc_threshold\": 0.1", llama_sampler_init_xtc(1.0f, 0.1f, 1, 1), spread);
        alone("\"samplers\": [\"top_n_sigma\"], \"top_n_sigma\": 1.3", llama_sampler_init_top_n_sigma(1.3f), spread);
        alone(
            "\"samplers\": [\"top_n_sigma\", \"top_k\", \"typical_p\", \"top_p\", \"min_p\", \"xtc\", \"temperature\"], "
            "\"top_n_sigma\": 2.5, \"top_k\": 60, \"typical_p\": 0.97, \"top_p\": 0.95, \"min_p\": 0.02, "
            "\"xtc_probability\": 1.0, \"xtc_threshold\": 0.05, \"temperature\": 0.8, \"dynatemp_range\": 0.3",
            chain({llama_sampler_init_top_n_sigma(2.5f), llama_sampler_init_top_k(60), llama_sampler_init_typical(0.97f, 1),
                   llama_sampler_init_top_p(0.95f, 1), llama_sampler_init_min_p(0.02f, 1),
                   llama_sampler_init_xtc(1.0f, 0.05f, 1, 1), llama_sampler_init_temp_ext(0.8f, 0.3f, 1.0f)}),
            spread);
    }
    for (float tau : {2.0f, 4.0f}) {
        const std::string rest = "\"mirostat_tau\": " + std::to_string(tau) + ", \"mirostat_eta\": 0.3";
        steps("\"mirostat_mode\": 1, " + rest, llama_sampler_init_mirostat(VOCAB_SIZE, 3, tau, 0.3f, 100), tau);
        steps("\"mirostat_mode\": 2, " + rest, llama_sampler_init_mirostat_v2(4, tau, 0.3f), tau);
    }
    for (int length : {3, 20, 60, 200}) {
        after("\"dry_multiplier\": 0.8, \"dry_penalty_last_n\": 100", llama_sampler_init_dry_testing(0.8f, 1.75f, 2, 100, {}), 9, length);
        after("\"dry_multiplier\": 0.5, \"dry_base\": 1.2, \"dry_allowed_length\": 1, \"dry_penalty_last_n\": 40", llama_sampler_init_dry_testing(0.5f, 1.2f, 1, 40, {{3}, {4, 5}}), 9, length);
        after("\"repetition_penalty\": 1.4, \"penalty_window\": 16", llama_sampler_init_penalties(VOCAB_SIZE, 16, 1.4f, 0.0f, 0.0f), 60, length);
        after("\"frequency_penalty\": 0.6, \"presence_penalty\": -0.3, \"penalty_window\": 2", llama_sampler_init_penalties(VOCAB_SIZE, 2, 1.0f, 0.6f, -0.3f), 9, length);
    }
    printf("\n]\n");
}
