// What a program in C++ gets from the library: `check BUNDLE BROKEN...`. Each line is a fact.
#include <algorithm>
#include <fstream>
#include <functional>
#include <iostream>
#include <set>
#include <thread>

#include "attn_export.hpp"

static_assert(!std::is_copy_constructible_v<attn::Session> && !std::is_copy_assignable_v<attn::Bundle>);

int code(const std::function<void()>& call) {
    try {
        call();
        return 0;
    } catch (const attn::Error& error) {
        return error.code;
    }
}

// Makes a session whose next token is `next`.
attn::Session ready(const attn::Bundle& bundle, std::vector<float>& next) {
    attn::Session session = bundle.session();
    std::vector<float> prompt(64, 0.5f);
    session.set_input("query", {1, 4, 16}, prompt);
    session.prefill(64);
    next.assign(16, 0.25f);
    session.set_input("query", {1, 1, 16}, next);
    return session;
}

// Runs steps that go back before the cache is full; returns an element of the last output.
float steps(attn::Session& session, std::vector<float>& next, int count) {
    for (int made = 0; made < count; made++) {
        if (session.get(ATTN_HELD) == 64) session.rewind(60);
        next[0] = 0.5f;
        session.step();
    }
    return session.output<float>("output")[0];
}

void try_bundle(const std::string& folder) {
    const attn::Bundle bundle(folder, "", 1);
    for (std::int64_t index = 0; index < bundle.get(ATTN_CASES); index++) {
        const auto [passed, line] = bundle.test_case(index);
        if (!passed) throw attn::Error(ATTN_MISMATCH, line);
    }
}

long resident() {
    std::ifstream status("/proc/self/statm");
    long whole = 0, pages = 0;
    status >> whole >> pages;
    return pages * 4;
}

int main(int argc, char** argv) {
    auto bundle = std::make_unique<attn::Bundle>(argv[1], "", 1);
    attn::Session fresh = bundle->session();
    std::vector<float> array(16), next;
    std::vector<double> doubles(16);
    const auto set = [&](const attn::Dims& dims, auto& data) {
        return code([&] { fresh.set_input("query", dims, data); });
    };
    std::cout << "step without a prefill: " << code([&] { fresh.step(); }) << '\n';
    std::cout << "wrong size: " << set({1, 1, 15}, array) << '\n';
    std::cout << "wrong bytes: " << set({1, 2, 16}, array) << '\n';
    std::cout << "wrong type: " << set({1, 1, 16}, doubles) << '\n';
    std::cout << "wrong row: " << code([&] { ready(*bundle, next).fork({1}); }) << '\n';
    std::cout << "output before a run: " << code([&] { fresh.output<float>("output"); }) << '\n';
    { const attn::Session moved = std::move(fresh); }
    std::cout << "closed: " << code([&] { fresh.step(); }) << ' ' << set({1, 1, 16}, array) << '\n';
    for (int at = 2; at < argc; at++) {
        std::cout << "broken: " << code([&] { try_bundle(argv[at]); }) << '\n';
    }
    float together[2];
    std::set<int> codes[2];
    attn::Session session = ready(*bundle, next);
    const auto work = [&](int own) {
        std::vector<float> mine;
        attn::Session alone = ready(*bundle, mine);
        together[own] = steps(alone, mine, 200);
        for (int n = 0; n < 200; n++) codes[own].insert(code([&] { session.rewind(0); }));
    };
    std::thread one(work, 0), other(work, 1);
    one.join();
    other.join();
    codes[0].merge(codes[1]);
    std::cout << std::boolalpha << "two threads agree: " << (together[0] == together[1]) << '\n';
    std::cout << "other codes of one session in two threads: "
              << codes[0].size() - codes[0].count(ATTN_OK) - codes[0].count(ATTN_BUSY) << '\n';
    bundle.reset();  // its sessions still work
    steps(session, next, 1000);
    const long before = resident();
    steps(session, next, 10000);
    std::cout << "copied: " << session.get(ATTN_COPIED) << '\n';
    std::cout << "grown: " << resident() - before << '\n';
}
