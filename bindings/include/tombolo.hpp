// tombolo.hpp: calls with deadlines between processes of one machine, for C++17: tombolo.h with owners instead of handles,
// exceptions instead of statuses, and chrono instead of nanoseconds. Header-only; link with libtombolo.
//
//     struct Calculator : tombolo::Worker {
//         void serve(const tombolo::Request &request, tombolo::Answer &answer) override { answer.write(result_of(request.bytes())); }
//     };
//     tombolo::Service service("calculator", std::make_shared<Calculator>());
//
//     tombolo::Client client("calculator");
//     tombolo::Reply reply = client.call("6 * 7", tombolo::CallOptions::within(5ms));
//
// Errors   What does not end well throws the class of its status, Late, Refused, ..., each of which is a tombolo::Error.
//          An exception that leaves Worker::serve ends there: the caller gets Failed.
// Owners   Client, Reply, Loan, Buffer and Service can be moved and not copied, and give back in their destructors what they hold.
// Memory   What view() shows may be written by the other side while it is read: what is looked at twice is copied first, by
//          bytes(). It lives as long as its Reply, or until its Worker::serve returns.
#ifndef TOMBOLO_HPP
#define TOMBOLO_HPP

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tombolo.h"

namespace tombolo {

using Nanoseconds = std::chrono::nanoseconds;

// Why something did not end well. what() has the reason in words.
class Error : public std::runtime_error {
public:
    Error(int32_t status, int32_t refusal, const std::string &text) : std::runtime_error(text), status_(status), refusal_(refusal) {}

    int32_t status() const noexcept { return status_; }
    // The status as one word, the same in all languages.
    const char *name() const noexcept { return tombolo_status_name(status_); }
    // Why a call was refused; TOMBOLO_REFUSAL_NONE for all else.
    int32_t refusal() const noexcept { return refusal_; }

private:
    int32_t status_;
    int32_t refusal_;
};

// The error of one status.
template <int32_t STATUS> class ErrorOf : public Error {
public:
    ErrorOf(int32_t refusal, const std::string &text) : Error(STATUS, refusal, text) {}
};

// The class of each status.
#define TOMBOLO_ERRORS_(X) \
    X(Late, TOMBOLO_LATE) X(Refused, TOMBOLO_REFUSED) X(Cancelled, TOMBOLO_CANCELLED) X(Expired, TOMBOLO_EXPIRED) \
    X(Failed, TOMBOLO_FAILED) X(ProviderGone, TOMBOLO_PROVIDER_GONE) X(Timeout, TOMBOLO_TIMEOUT) X(Broken, TOMBOLO_BROKEN) \
    X(Busy, TOMBOLO_BUSY) X(Memory, TOMBOLO_MEMORY) X(Share, TOMBOLO_SHARE) X(Range, TOMBOLO_RANGE) \
    X(Reclaimed, TOMBOLO_RECLAIMED) X(ReplyMemory, TOMBOLO_REPLY_MEMORY) X(UnknownCall, TOMBOLO_UNKNOWN_CALL) \
    X(NoService, TOMBOLO_NO_SERVICE) X(Denied, TOMBOLO_DENIED) X(Silent, TOMBOLO_SILENT) X(ConnectGone, TOMBOLO_CONNECT_GONE) \
    X(Protocol, TOMBOLO_PROTOCOL) X(Section, TOMBOLO_SECTION) X(Name, TOMBOLO_NAME) X(NoPlace, TOMBOLO_NO_PLACE) \
    X(Running, TOMBOLO_RUNNING) X(LongPath, TOMBOLO_LONG_PATH) X(Option, TOMBOLO_OPTION) X(System, TOMBOLO_SYSTEM) \
    X(Argument, TOMBOLO_ARGUMENT) X(UnknownHandle, TOMBOLO_UNKNOWN_HANDLE) X(NoRoom, TOMBOLO_NO_ROOM) \
    X(InHandler, TOMBOLO_IN_HANDLER) X(Panic, TOMBOLO_PANIC) X(ReplyTooLarge, TOMBOLO_REPLY_TOO_LARGE) \
    X(DeadlineExceeded, TOMBOLO_DEADLINE_EXCEEDED)

#define TOMBOLO_ERROR_(Name, STATUS) using Name = ErrorOf<STATUS>;
TOMBOLO_ERRORS_(TOMBOLO_ERROR_)
#undef TOMBOLO_ERROR_

namespace detail {

[[noreturn]] inline void raise(int32_t status, int32_t refusal, const std::string &text) {
    switch (status) {
#define TOMBOLO_ERROR_(Name, STATUS) \
    case STATUS: throw Name(refusal, text);
        TOMBOLO_ERRORS_(TOMBOLO_ERROR_)
#undef TOMBOLO_ERROR_
#undef TOMBOLO_ERRORS_
        default: throw Error(status, refusal, text);
    }
}

inline void check(int32_t status) {
    if (status != TOMBOLO_OK) raise(status, status == TOMBOLO_REFUSED ? tombolo_error_refusal() : TOMBOLO_REFUSAL_NONE, tombolo_error_text());
}

// A duration for C: no less than none, and 1 for 0 where 0 would mean the default.
inline uint64_t ns(Nanoseconds duration) { return duration.count() < 0 ? 0 : static_cast<uint64_t>(duration.count()); }
inline uint64_t ns_or_default(const std::optional<Nanoseconds> &duration) { return duration ? std::max<uint64_t>(ns(*duration), 1) : 0; }

// The owner of a handle.
template <typename Handle, int32_t (*FREE)(Handle)> class Owner {
public:
    Owner() noexcept : handle_{0} {}
    explicit Owner(Handle handle) noexcept : handle_(handle) {}
    Owner(Owner &&other) noexcept : handle_(other.release()) {}
    Owner &operator=(Owner &&other) noexcept {
        if (this != &other) {
            reset();
            handle_ = other.release();
        }
        return *this;
    }
    Owner(const Owner &) = delete;
    Owner &operator=(const Owner &) = delete;
    ~Owner() { reset(); }

    Handle get() const noexcept { return handle_; }
    Handle *out() noexcept { return &handle_; }
    Handle release() noexcept { return std::exchange(handle_, Handle{0}); }
    void reset() noexcept {
        const Handle handle = release();
        if (handle.id != 0) FREE(handle);
    }

private:
    Handle handle_;
};

}  // namespace detail

// Now, on the clock of deadlines.
inline uint64_t now_ns() noexcept { return tombolo_now_ns(); }

// What a call asks for, besides its bytes.
class CallOptions {
public:
    // No deadline of its own: that of the request which this thread serves, if it serves one.
    CallOptions() = default;
    // With a deadline so much after the call.
    static CallOptions within(Nanoseconds left) { return CallOptions(TOMBOLO_DEADLINE_WITHIN, detail::ns(left)); }
    // With a deadline at an instant of CLOCK_MONOTONIC.
    static CallOptions at(uint64_t instant_ns) { return CallOptions(TOMBOLO_DEADLINE_AT, instant_ns); }

    // For how long after the deadline a late reply is waited for (Reply::is_late); unless it is set the call ends at its deadline.
    CallOptions &wait_late(Nanoseconds late) {
        options_.wait_late_ns = detail::ns(late);
        return *this;
    }
    // How long the caller waits where the deadline is later or there is none; 30 s unless it is set.
    CallOptions &timeout(Nanoseconds patience) {
        options_.timeout_ns = detail::ns_or_default(patience);
        return *this;
    }
    // How long the request may wait at the service.
    CallOptions &ttl(Nanoseconds ttl) {
        options_.ttl_ns = detail::ns_or_default(ttl);
        return *this;
    }
    // Carried to the service.
    CallOptions &trace(uint64_t trace) {
        options_.trace = trace;
        return *this;
    }
    const tombolo_call_options *c() const noexcept { return &options_; }

private:
    CallOptions(tombolo_deadline kind, uint64_t ns) {
        options_.deadline_kind = kind;
        options_.deadline_ns = ns;
    }
    tombolo_call_options options_ = TOMBOLO_CALL_OPTIONS_INIT;
};

// What a call brought back.
class Reply {
public:
    explicit Reply(tombolo_reply handle) : owner_(handle) { detail::check(tombolo_reply_get(handle, &info_)); }

    // The application's code; 0 is success.
    uint32_t code() const noexcept { return info_.code; }
    // A copy of the bytes. Throws Reclaimed where the reply was held for too long.
    std::string bytes() const {
        std::string copy(info_.len, '\0');
        size_t copied = 0;
        detail::check(tombolo_reply_copy(owner_.get(), &copy[0], copy.size(), &copied));
        return copy;
    }
    // The bytes where they are; is_current() tells afterwards whether what was read was theirs.
    std::string_view view() const noexcept { return {static_cast<const char *>(info_.data), static_cast<size_t>(info_.len)}; }
    bool is_current() const noexcept { return tombolo_reply_check(owner_.get()) == TOMBOLO_OK; }
    // How long the request waited at the service, and how long it was served.
    // Whether it came after the call's deadline.
    bool is_late() const noexcept { return info_.late != 0; }
    Nanoseconds queued() const noexcept { return Nanoseconds(info_.queued_ns); }
    Nanoseconds service() const noexcept { return Nanoseconds(info_.service_ns); }

private:
    detail::Owner<tombolo_reply, tombolo_reply_free> owner_;
    tombolo_reply_info info_{};
};

// How one of several calls ended.
class End {
public:
    explicit End(const tombolo_end &end) : status_(end.status), refusal_(end.refusal) {
        if (status_ == TOMBOLO_OK) reply_.emplace(end.reply);
    }
    int32_t status() const noexcept { return status_; }
    const char *name() const noexcept { return tombolo_status_name(status_); }
    // The reply; any other end throws.
    Reply &reply() {
        if (!reply_) detail::raise(status_, refusal_, tombolo_status_name(status_));
        return *reply_;
    }

private:
    int32_t status_;
    int32_t refusal_;
    std::optional<Reply> reply_;
};

// Room for a request in the connection's memory, to be written in place.
class Loan {
public:
    char *data() const noexcept { return static_cast<char *>(data_); }
    uint64_t size() const noexcept { return size_; }

private:
    friend class Client;
    detail::Owner<tombolo_loan, tombolo_loan_free> owner_;
    void *data_ = nullptr;
    uint64_t size_ = 0;
};

// Memory that is written here and read by the other side without a copy.
class Buffer {
public:
    // Zeroed; with populate its pages are there at once.
    explicit Buffer(uint64_t bytes, bool populate = false) : size_(bytes) {
        detail::check(tombolo_buffer_new(bytes, populate, owner_.out(), &data_));
    }
    // The memory of a memfd that is there already, whole; sealed against shrinking and growing, or it throws Section. The descriptor stays the
    // caller's. Where it is sealed against writing, data() is for reading only.
    static Buffer of_memfd(int fd) {
        Buffer buffer;
        int32_t writable = 0;
        detail::check(tombolo_buffer_of_memfd(fd, buffer.owner_.out(), &buffer.data_, &buffer.size_, &writable));
        buffer.writable_ = writable != 0;
        return buffer;
    }
    char *data() const noexcept { return static_cast<char *>(data_); }
    uint64_t size() const noexcept { return size_; }
    bool is_writable() const noexcept { return writable_; }
    tombolo_buffer c() const noexcept { return owner_.get(); }

private:
    Buffer() = default;
    detail::Owner<tombolo_buffer, tombolo_buffer_free> owner_;
    void *data_ = nullptr;
    uint64_t size_ = 0;
    bool writable_ = true;
};

// A call under way, of the client that gave it.
using Token = tombolo_token;

// How a client connects; as tombolo_connect_options.
struct ConnectOptions {
    uint32_t entries = 0;
    uint64_t arena_bytes = 0;
    uint64_t max_shared_bytes = 0;
    std::optional<Nanoseconds> patience;
    tombolo_polling polling = TOMBOLO_POLLING_ADAPTIVE;
    std::string folder;
};

// A connection to a service. Threads may share it.
class Client {
public:
    explicit Client(const std::string &name, const ConnectOptions &options = {}) {
        tombolo_connect_options c = TOMBOLO_CONNECT_OPTIONS_INIT;
        c.entries = options.entries;
        c.arena_bytes = options.arena_bytes;
        c.max_shared_bytes = options.max_shared_bytes;
        c.patience_ns = detail::ns_or_default(options.patience);
        c.polling = options.polling;
        c.folder = options.folder.empty() ? nullptr : options.folder.c_str();
        detail::check(tombolo_connect(name.c_str(), &c, owner_.out()));
    }

    // Calls and waits for the reply.
    Reply call(std::string_view bytes, const CallOptions &options = {}) const {
        tombolo_reply reply;
        detail::check(tombolo_call(owner_.get(), bytes.data(), bytes.size(), options.c(), &reply));
        return Reply(reply);
    }
    // Calls without waiting.
    Token submit(std::string_view bytes, const CallOptions &options = {}) const {
        Token token;
        detail::check(tombolo_submit(owner_.get(), bytes.data(), bytes.size(), options.c(), &token));
        return token;
    }
    // The reply, if it is there. Any other end throws.
    std::optional<Reply> poll(Token token) const {
        tombolo_reply reply;
        const int32_t status = tombolo_poll(owner_.get(), token, &reply);
        if (status == TOMBOLO_PENDING) return std::nullopt;
        detail::check(status);
        return Reply(reply);
    }
    // Waits for the reply; after the time the call is cancelled, and throws Timeout, or at its deadline DeadlineExceeded.
    Reply wait(Token token, Nanoseconds timeout) const {
        tombolo_reply reply;
        detail::check(tombolo_wait(owner_.get(), token, detail::ns(timeout), &reply));
        return Reply(reply);
    }
    // Waits until one of these calls can be polled; which.
    std::optional<size_t> wait_any(const std::vector<Token> &tokens, Nanoseconds timeout) const {
        size_t which = 0;
        const int32_t status = tombolo_wait_any(owner_.get(), tokens.data(), tokens.size(), detail::ns(timeout), &which);
        if (status == TOMBOLO_PENDING) return std::nullopt;
        detail::check(status);
        return which;
    }
    // Waits for all of these calls: how each ended, in their order. Those whose answer has not come after the time are cancelled.
    std::vector<End> wait_all(const std::vector<Token> &tokens, Nanoseconds timeout) const {
        std::vector<tombolo_end> ends(tokens.size());
        detail::check(tombolo_wait_all(owner_.get(), tokens.data(), tokens.size(), detail::ns(timeout), ends.data()));
        return std::vector<End>(ends.begin(), ends.end());
    }
    // Asks the service to take a call back; false where it is not under way any more.
    bool cancel(Token token) const noexcept { return tombolo_cancel(owner_.get(), token) == TOMBOLO_OK; }

    // Room for a request of len bytes; throws NoRoom where there is none now.
    Loan loan(uint64_t len) const {
        Loan loan;
        detail::check(tombolo_loan_new(owner_.get(), len, loan.owner_.out(), &loan.data_));
        loan.size_ = len;
        return loan;
    }
    Token submit(Loan &&loan, const CallOptions &options = {}) const {
        Token token;
        detail::check(tombolo_loan_submit(owner_.get(), loan.owner_.release(), options.c(), &token));
        return token;
    }
    // Sends a part of a buffer, which must not be written before the answer.
    Token submit(const Buffer &buffer, uint64_t offset, uint64_t len, const CallOptions &options = {}) const {
        Token token;
        detail::check(tombolo_buffer_submit(owner_.get(), buffer.c(), offset, len, options.c(), &token));
        return token;
    }

private:
    detail::Owner<tombolo_client, tombolo_close> owner_;
};

// A request that is being served.
class Request {
public:
    explicit Request(const tombolo_request &request) noexcept : request_(request) {}

    std::string_view view() const noexcept { return {static_cast<const char *>(request_.data), static_cast<size_t>(request_.len)}; }
    std::string bytes() const { return std::string(view()); }
    // The deadline, an instant of CLOCK_MONOTONIC; none for best effort.
    std::optional<uint64_t> deadline_ns() const noexcept {
        return request_.deadline_ns == UINT64_MAX ? std::nullopt : std::optional<uint64_t>(request_.deadline_ns);
    }
    // What is left until then; 0 when it has passed.
    std::optional<Nanoseconds> left() const noexcept {
        const auto deadline = deadline_ns();
        if (!deadline) return std::nullopt;
        const uint64_t now = now_ns();
        return Nanoseconds(*deadline > now ? *deadline - now : 0);
    }
    uint64_t trace() const noexcept { return request_.trace; }
    Nanoseconds queued() const noexcept { return Nanoseconds(request_.queued_ns); }
    // Who calls, as the kernel says.
    uint32_t pid() const noexcept { return request_.pid; }
    uint32_t uid() const noexcept { return request_.uid; }
    uint32_t gid() const noexcept { return request_.gid; }

private:
    const tombolo_request &request_;
};

// The answer to a request: empty until something is put in; what is put in last is sent.
class Answer {
public:
    explicit Answer(tombolo_answer *answer) noexcept : answer_(answer) {}

    // Throws NoRoom where the client holds too many replies; it gets Refused, unless something else is put in.
    void write(std::string_view bytes) { put(tombolo_answer_write(answer_, bytes.data(), bytes.size())); }
    // Room for this many bytes, to be written before serve returns.
    char *loan(uint64_t len) {
        void *data = nullptr;
        put(tombolo_answer_loan(answer_, len, &data));
        return static_cast<char *>(data);
    }
    void share(const Buffer &buffer, uint64_t offset, uint64_t len) { put(tombolo_answer_share(answer_, buffer.c(), offset, len)); }
    // The application's code; 0, which it is unless set, is success.
    void code(uint32_t code) { detail::check(tombolo_answer_code(answer_, code)); }

private:
    friend class Service;
    void put(int32_t status) {
        refused_ = status == TOMBOLO_NO_ROOM;
        detail::check(status);
    }
    tombolo_answer *answer_;
    // The library answers as refused.
    bool refused_ = false;
};

// Who serves: derive, and override serve. It is called by as many threads at a time as the service has workers.
class Worker {
public:
    virtual ~Worker() = default;
    virtual void serve(const Request &request, Answer &answer) = 0;
};

// How a service runs; as tombolo_service_options, whose defaults these are.
struct ServiceOptions {
    uint32_t workers = 1;
    tombolo_worker_class worker_class = TOMBOLO_CLASS_NORMAL;
    uint32_t fifo_priority = 0;
    std::optional<Nanoseconds> budget;
    std::optional<Nanoseconds> period;
    uint64_t queue_bound = 0;
    tombolo_late_policy late_policy = TOMBOLO_LATE_REFUSE;
    tombolo_order order = TOMBOLO_ORDER_EDF;
    bool admission = false;
    std::vector<uint32_t> uids;
    std::vector<uint32_t> gids;
    bool everybody = false;
    tombolo_polling polling = TOMBOLO_POLLING_ADAPTIVE;
    uint32_t max_clients = 0;
    uint32_t max_clients_per_uid = 0;
    uint64_t max_bytes_per_uid = 0;
    uint64_t max_entries_per_uid = 0;
    uint32_t max_entries = 0;
    uint64_t max_arena_bytes = 0;
    uint64_t reply_arena_bytes = 0;
    uint64_t max_shared_bytes = 0;
    std::optional<Nanoseconds> ttl;
    std::optional<Nanoseconds> reply_ttl;
    std::optional<Nanoseconds> slow;
    std::string folder;
};

// A service: runs in threads of its own until it is stopped or destroyed, which waits for them.
class Service {
public:
    Service(const std::string &name, std::shared_ptr<Worker> worker, const ServiceOptions &options = {}) : worker_(std::move(worker)) {
        if (!worker_) throw std::invalid_argument("tombolo::Service: a worker is needed");
        tombolo_service_options c = TOMBOLO_SERVICE_OPTIONS_INIT;
        c.workers = options.workers;
        c.worker_class = options.worker_class;
        c.fifo_priority = options.fifo_priority;
        c.budget_ns = detail::ns_or_default(options.budget);
        c.period_ns = detail::ns_or_default(options.period);
        c.queue_bound = options.queue_bound;
        c.late_policy = options.late_policy;
        c.order = options.order;
        c.admission = options.admission;
        c.uids = options.uids.data();
        c.uid_count = options.uids.size();
        c.gids = options.gids.data();
        c.gid_count = options.gids.size();
        c.everybody = options.everybody;
        c.polling = options.polling;
        c.max_clients = options.max_clients;
        c.max_clients_per_uid = options.max_clients_per_uid;
        c.max_bytes_per_uid = options.max_bytes_per_uid;
        c.max_entries_per_uid = options.max_entries_per_uid;
        c.max_entries = options.max_entries;
        c.max_arena_bytes = options.max_arena_bytes;
        c.reply_arena_bytes = options.reply_arena_bytes;
        c.max_shared_bytes = options.max_shared_bytes;
        c.ttl_ns = detail::ns_or_default(options.ttl);
        c.reply_ttl_ns = detail::ns_or_default(options.reply_ttl);
        c.slow_ns = detail::ns_or_default(options.slow);
        c.folder = options.folder.empty() ? nullptr : options.folder.c_str();
        detail::check(tombolo_register(name.c_str(), &c, &Service::serve, worker_.get(), owner_.out()));
    }
    Service(Service &&) noexcept = default;
    Service &operator=(Service &&other) noexcept {
        // The running service first: its handler uses the worker.
        owner_ = std::move(other.owner_);
        worker_ = std::move(other.worker_);
        return *this;
    }

    // Ends it; handlers under way are waited for. Not from within one of them.
    void stop() {
        detail::check(tombolo_stop(owner_.get()));
        owner_.release();
    }
    tombolo_stats stats() const {
        tombolo_stats stats{};
        stats.size = sizeof stats;
        detail::check(tombolo_service_stats(owner_.get(), &stats));
        return stats;
    }

private:
    static int32_t serve(void *context, const tombolo_request *request, tombolo_answer *answer) noexcept {
        Answer to(answer);
        try {
            static_cast<Worker *>(context)->serve(Request(*request), to);
            return 0;
        } catch (const NoRoom &) {
            return to.refused_ ? 0 : 1;
        } catch (...) {
            return 1;
        }
    }

    // Destroyed last: the service ends before it.
    std::shared_ptr<Worker> worker_;
    detail::Owner<tombolo_service, tombolo_stop> owner_;
};

}  // namespace tombolo

#endif
