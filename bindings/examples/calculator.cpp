// A service that calculates, and its client, in C++17. calculator.c tells the protocol and the arguments, which are the same in all
// languages.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <thread>
#include <unistd.h>

#include "tombolo.hpp"

namespace {

constexpr uint32_t NOT_UNDERSTOOD = 1;
constexpr uint32_t DIVISION_BY_ZERO = 2;

struct Result {
    uint32_t code;
    std::string text;
};

// A decimal number, which takes the whole word; strtod alone would take "inf" and "0x10", too.
bool number(const std::string &word, double &value) {
    char *end = nullptr;
    value = std::strtod(word.c_str(), &end);
    return !word.empty() && *end == 0 && word.find_first_not_of("0123456789.eE+-") == std::string::npos;
}

Result calculate(const std::string &text) {
    std::istringstream words(text);
    std::string a_word, operation, b_word, more;
    double a = 0, b = 0;
    const bool fine = (words >> a_word >> operation >> b_word) && !(words >> more) && number(a_word, a) && number(b_word, b);
    double result = 0;
    if (fine && operation == "+") result = a + b;
    else if (fine && operation == "-") result = a - b;
    else if (fine && operation == "*") result = a * b;
    else if (fine && operation == "/" && b == 0) return {DIVISION_BY_ZERO, "division by zero"};
    else if (fine && operation == "/") result = a / b;
    else return {NOT_UNDERSTOOD, "expected \"A + B\", with + - * or /"};
    char digits[512];
    std::snprintf(digits, sizeof digits, "%.6f", result);
    std::string shown = digits;
    if (shown.find('.') != std::string::npos) {
        shown.erase(shown.find_last_not_of('0') + 1);
        if (shown.back() == '.') shown.pop_back();
    }
    return {0, shown};
}

class Calculator : public tombolo::Worker {
public:
    explicit Calculator(std::chrono::milliseconds delay) : delay_(delay) {}

    void serve(const tombolo::Request &request, tombolo::Answer &answer) override {
        if (delay_.count() > 0) {
            std::cout << "working" << std::endl;
            std::this_thread::sleep_for(delay_);
        }
        const Result result = calculate(request.bytes());
        answer.code(result.code);
        answer.write(result.text);
    }

private:
    std::chrono::milliseconds delay_;
};

int call(const std::string &name, const std::string &text, const tombolo::CallOptions &options) {
    const tombolo::Client client(name);
    const tombolo::Reply reply = client.call(text, options);
    if (reply.code() != 0) std::cout << "code " << reply.code() << ": ";
    std::cout << reply.bytes() << std::endl;
    return reply.code() == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    std::string name = "calculator", text;
    std::chrono::milliseconds delay(0), within(5), timeout(30000);
    for (int at = 1; at < argc; at++) {
        const std::string word = argv[at];
        const bool has_value = at + 1 < argc;
        if (has_value && word == "--name") name = argv[++at];
        else if (has_value && word == "--delay-ms") delay = std::chrono::milliseconds(std::atol(argv[++at]));
        else if (has_value && word == "--within-ms") within = std::chrono::milliseconds(std::atol(argv[++at]));
        else if (has_value && word == "--timeout-ms") timeout = std::chrono::milliseconds(std::atol(argv[++at]));
        else if (word.rfind("--", 0) == 0) {
            std::cerr << word << ": expected [--name NAME] [--delay-ms MS] to serve, [--name NAME] [--within-ms MS] [--timeout-ms MS] 'A + B' to call" << std::endl;
            return 2;
        } else text = word;
    }
    try {
        if (!text.empty()) return call(name, text, tombolo::CallOptions::within(within).timeout(timeout));
        tombolo::ServiceOptions options;
        options.workers = 2;
        options.budget = std::chrono::microseconds(50);
        options.admission = true;
        const tombolo::Service service(name, std::make_shared<Calculator>(delay), options);
        std::cout << "serving" << std::endl;
        for (;;) pause();
    } catch (const tombolo::Error &error) {
        std::cout << "error: " << error.name() << std::endl;
        std::cerr << error.what() << std::endl;
        return 2;
    }
}
