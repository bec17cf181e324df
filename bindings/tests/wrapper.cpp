// Tests of tombolo.hpp: what the calculator does not use. Prints the name of each test that passed; ends with 1 at the first that fails.
//
//     wrapper FOLDER     the folder of sockets
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <fcntl.h>
#include <iostream>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "tombolo.hpp"

using namespace std::chrono_literals;

namespace {

std::string folder;

#define EXPECT(condition)                                                                             \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            std::cerr << __FILE__ << ":" << __LINE__ << ": expected " << #condition << std::endl;     \
            std::exit(1);                                                                             \
        }                                                                                             \
    } while (false)

template <typename Kind, typename Body> void expect_throw(int line, Body body) {
    try {
        body();
    } catch (const Kind &) {
        return;
    } catch (const tombolo::Error &error) {
        std::cerr << __FILE__ << ":" << line << ": threw " << error.name() << ": " << error.what() << std::endl;
        std::exit(1);
    }
    std::cerr << __FILE__ << ":" << line << ": threw nothing" << std::endl;
    std::exit(1);
}
#define EXPECT_THROW(Kind, ...) expect_throw<Kind>(__LINE__, [&] { __VA_ARGS__; })

tombolo::ServiceOptions here() {
    tombolo::ServiceOptions options;
    options.folder = folder;
    return options;
}

tombolo::Client connect(const std::string &name) {
    tombolo::ConnectOptions options;
    options.folder = folder;
    return tombolo::Client(name, options);
}

// A door that handlers wait at.
class Gate {
public:
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_++;
        turn_.notify_all();
        turn_.wait(lock, [this] { return open_; });
    }
    void reached() {
        std::unique_lock<std::mutex> lock(mutex_);
        EXPECT(turn_.wait_for(lock, 20s, [this] { return waiting_ > 0; }));
    }
    void open() {
        const std::lock_guard<std::mutex> lock(mutex_);
        open_ = true;
        turn_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable turn_;
    bool open_ = false;
    int waiting_ = 0;
};

// Does what the first word of a request says.
class Tester : public tombolo::Worker {
public:
    void serve(const tombolo::Request &request, tombolo::Answer &answer) override {
        const std::string text = request.bytes();
        if (text == "throw") throw std::runtime_error("as asked for");
        if (text == "throw 1") throw 1;
        if (text == "gate") return gate.wait();
        if (text == "too large") {
            answer.loan(uint64_t(1) << 40);
            return;
        }
        if (text == "loan") {
            char *to = answer.loan(10000);
            std::fill(to, to + 10000, 'l');
            return;
        }
        if (text == "share") return answer.share(buffer, 100, 3);
        if (text == "who") return answer.write(std::to_string(request.pid()) + " " + std::to_string(request.trace()));
        if (text == "left") return answer.write(request.left() ? (*request.left() > 0ns ? "some" : "none left") : "no deadline");
        if (text == "nested") {
            // A call without a deadline of its own has its caller's.
            const tombolo::Client inner = connect("inner");
            return answer.write(inner.call("left").bytes());
        }
        answer.write(text);
    }

    Gate gate;
    tombolo::Buffer buffer{4096};
};

void replies_of_all_sizes() {
    const tombolo::Service service("tester", std::make_shared<Tester>(), here());
    const tombolo::Client client = connect("tester");
    for (const size_t len : {0, 1, 192, 193, 70000, 3000000}) {
        std::string bytes(len, 'x');
        for (size_t at = 0; at < len; at++) bytes[at] = static_cast<char>(at * 31);
        // Above the reply memory of a connection the service refuses.
        if (len > 1 << 20) {
            EXPECT_THROW(tombolo::Refused, client.call(bytes));
        } else {
            const tombolo::Reply reply = client.call(bytes);
            EXPECT(reply.bytes() == bytes && reply.view() == bytes && reply.is_current() && reply.code() == 0);
        }
    }
    EXPECT(client.call("loan").bytes() == std::string(10000, 'l'));
}

void exceptions_end_in_the_handler() {
    const tombolo::Service service("tester", std::make_shared<Tester>(), here());
    const tombolo::Client client = connect("tester");
    EXPECT_THROW(tombolo::Failed, client.call("throw"));
    EXPECT_THROW(tombolo::Failed, client.call("throw 1"));
    try {
        client.call("too large");
        EXPECT(false);
    } catch (const tombolo::Refused &error) {
        EXPECT(error.refusal() == TOMBOLO_REFUSAL_REPLY_MEMORY && error.name() == std::string("refused"));
    }
    EXPECT(client.call("goes on").bytes() == "goes on");
    EXPECT(service.stats().failed == 2 && service.stats().refused_reply_memory == 1);
}

void memory_of_ones_own() {
    const auto worker = std::make_shared<Tester>();
    std::copy_n("abc", 3, worker->buffer.data() + 100);
    const tombolo::Service service("tester", worker, here());
    const tombolo::Client client = connect("tester");
    EXPECT(client.call("share").bytes() == "abc");
    tombolo::Buffer buffer(1 << 20);
    std::copy_n("shared", 6, buffer.data() + 5000);
    EXPECT(client.wait(client.submit(buffer, 5000, 6), 20s).bytes() == "shared");
    EXPECT_THROW(tombolo::Range, client.submit(buffer, 1 << 20, 1));
    tombolo::Loan loan = client.loan(300);
    std::fill(loan.data(), loan.data() + 300, 'i');
    EXPECT(client.wait(client.submit(std::move(loan)), 20s).bytes() == std::string(300, 'i'));
    // Loans that are not sent come back: there is room for one of this size only.
    for (int n = 0; n < 5; n++) EXPECT(client.loan(600000).size() == 600000);
    EXPECT_THROW(tombolo::NoRoom, client.loan(uint64_t(1) << 40));
}

void replies_beyond_what_the_connection_takes() {
    const tombolo::Service service("tester", std::make_shared<Tester>(), here());
    tombolo::ConnectOptions options;
    options.folder = folder;
    options.max_shared_bytes = 4095;
    const tombolo::Client client("tester", options);
    EXPECT_THROW(tombolo::ReplyTooLarge, client.call("share"));
    EXPECT(client.call("goes on").bytes() == "goes on");
    options.max_shared_bytes = 4096;
    EXPECT(tombolo::Client("tester", options).call("share").bytes().size() == 3);
}

void memory_that_is_there_already() {
    const tombolo::Service service("tester", std::make_shared<Tester>(), here());
    const tombolo::Client client = connect("tester");
    const int sealed = F_SEAL_SHRINK | F_SEAL_GROW;
    for (const int seals : {sealed, sealed | F_SEAL_WRITE}) {
        const int fd = memfd_create("theirs", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        EXPECT(pwrite(fd, "there already", 13, 299987) == 13);
        EXPECT_THROW(tombolo::Section, tombolo::Buffer::of_memfd(fd));
        EXPECT(fcntl(fd, F_ADD_SEALS, seals) == 0);
        tombolo::Buffer buffer = tombolo::Buffer::of_memfd(fd);
        close(fd);
        EXPECT(buffer.size() == 300000 && buffer.is_writable() == (seals == sealed));
        EXPECT(std::string(buffer.data() + 299987, 13) == "there already");
        if (buffer.is_writable()) buffer.data()[299987] = 'T';
        const std::string expected = buffer.is_writable() ? "There already" : "there already";
        EXPECT(client.wait(client.submit(buffer, 299987, 13), 20s).bytes() == expected);
    }
    const int empty = memfd_create("theirs", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(fcntl(empty, F_ADD_SEALS, sealed) == 0);
    EXPECT_THROW(tombolo::Section, tombolo::Buffer::of_memfd(empty));
    close(empty);
    EXPECT_THROW(tombolo::Section, tombolo::Buffer::of_memfd(STDIN_FILENO));
    EXPECT_THROW(tombolo::Argument, tombolo::Buffer::of_memfd(-1));
}

void tokens() {
    const auto worker = std::make_shared<Tester>();
    const tombolo::Service service("tester", worker, here());
    const tombolo::Client client = connect("tester");
    const tombolo::Token blocked = client.submit("gate");
    worker->gate.reached();
    const tombolo::Token queued = client.submit("queued"), late = client.submit("late", tombolo::CallOptions::within(1ms).wait_late(20s));
    EXPECT(!client.poll(queued));
    EXPECT_THROW(tombolo::Late, client.wait(late, 20s));
    EXPECT_THROW(tombolo::DeadlineExceeded, client.call("hangs", tombolo::CallOptions::within(1ms)));
    EXPECT(client.cancel(queued));
    EXPECT(client.wait_any({blocked, queued}, 20s) == 1u);
    EXPECT_THROW(tombolo::Cancelled, client.poll(queued));
    EXPECT(!client.cancel(queued));
    EXPECT_THROW(tombolo::Expired, client.call("expires", tombolo::CallOptions().ttl(1ms)));
    EXPECT_THROW(tombolo::Timeout, client.call("waits", tombolo::CallOptions().timeout(1ms)));
    EXPECT(!client.wait_any({blocked}, 1ms));
    worker->gate.open();
    std::vector<tombolo::End> ends = client.wait_all({queued, blocked, client.submit("last")}, 20s);
    EXPECT(ends.size() == 3 && ends[0].status() == TOMBOLO_UNKNOWN_CALL && ends[1].name() == std::string("ok"));
    EXPECT_THROW(tombolo::UnknownCall, ends[0].reply());
    EXPECT(ends[1].reply().bytes().empty() && ends[2].reply().bytes() == "last");
    EXPECT(client.wait_all({}, 1ms).empty());
}

void deadlines_are_inherited() {
    const tombolo::Service inner("inner", std::make_shared<Tester>(), here());
    const tombolo::Service service("tester", std::make_shared<Tester>(), here());
    const tombolo::Client client = connect("tester");
    EXPECT(client.call("nested").bytes() == "no deadline");
    EXPECT(client.call("nested", tombolo::CallOptions::within(20s)).bytes() == "some");
    EXPECT(client.call("left", tombolo::CallOptions::at(tombolo::now_ns() + 20000000000)).bytes() == "some");
    EXPECT_THROW(tombolo::DeadlineExceeded, client.call("left", tombolo::CallOptions::at(1)));
    EXPECT(client.call("who", tombolo::CallOptions().trace(77)).bytes() == std::to_string(getpid()) + " 77");
}

void owners_move() {
    auto service = std::make_unique<tombolo::Service>("tester", std::make_shared<Tester>(), here());
    EXPECT_THROW(tombolo::Running, tombolo::Service("tester", std::make_shared<Tester>(), here()));
    tombolo::Client client = connect("tester");
    tombolo::Client moved = std::move(client);
    EXPECT_THROW(tombolo::UnknownHandle, client.call("by whom"));
    tombolo::Reply reply = moved.call(std::string(5000, 'r'));
    { const tombolo::Client closed = std::move(moved); }
    EXPECT(reply.bytes() == std::string(5000, 'r'));  // a reply outlives its client
    tombolo::Client other = connect("tester");
    const tombolo::Token token = other.submit("last");
    EXPECT(other.wait(token, 20s).bytes() == "last");
    tombolo::Service kept = std::move(*service);
    service.reset();
    EXPECT(other.call("runs on").bytes() == "runs on");
    kept.stop();
    EXPECT_THROW(tombolo::ProviderGone, other.call("nobody"));
    EXPECT_THROW(tombolo::NoService, connect("tester"));
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    folder = argv[1];
    const std::pair<const char *, void (*)()> tests[] = {
        {"replies_of_all_sizes", replies_of_all_sizes},
        {"exceptions_end_in_the_handler", exceptions_end_in_the_handler},
        {"memory_of_ones_own", memory_of_ones_own},
        {"replies_beyond_what_the_connection_takes", replies_beyond_what_the_connection_takes},
        {"memory_that_is_there_already", memory_that_is_there_already},
        {"tokens", tokens},
        {"deadlines_are_inherited", deadlines_are_inherited},
        {"owners_move", owners_move},
    };
    for (const auto &test : tests) {
        test.second();
        std::cout << test.first << std::endl;
    }
}
