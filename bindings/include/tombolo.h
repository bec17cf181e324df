/*
 * tombolo.h: calls with deadlines between processes of one machine, for C (99 and later) and whatever calls C.
 *
 * Link with libtombolo.so, or with libtombolo.a and -lpthread -ldl -lm (crate tombolo-ffi). docs/rpc.md tells how a call travels,
 * docs/rpc-languages.md how its ends are named in each language.
 *
 * Status   Each function that can fail returns a tombolo_status as int32_t: TOMBOLO_OK, or why not; tombolo_error_text() then has the
 *          reason in words, per thread. Results come through pointers, which are written on success only, except that a handle is
 *          set to 0 on failure. No panic crosses this boundary, and no exception may: a handler must not throw.
 * Handles  are numbers, never 0, not pointers: one that was closed, or is of another kind, or was never given out, is
 *          TOMBOLO_UNKNOWN_HANDLE and nothing else. A null pointer where one is needed is TOMBOLO_ARGUMENT.
 * Threads  Each function may be called by any thread at any time. Closing a handle while another thread uses it is safe.
 * Options  are structs to be initialised with the macro beside them; null, and each field that is 0, is the default.
 * Time     is uint64_t nanoseconds; an instant is one of CLOCK_MONOTONIC (tombolo_now_ns).
 * Memory   A pointer into a request or a reply shows memory that the other side may write at any moment: what is looked at twice
 *          is copied first. It can never be read out of bounds, and never faults while its owner (said at each) lives.
 * fork     A connection and a service do not survive fork(). In the child each call on its parent's connection is TOMBOLO_PROVIDER_GONE, and what
 *          it closes, frees or stops of its parent's stays the parent's; it may connect and register again. Any thread may fork at any time, but not in a
 *          handler of a signal, nor by _Fork() or clone() unless the child becomes another program.
 */
#ifndef TOMBOLO_H
#define TOMBOLO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Counts incompatible changes of this file; tombolo_abi_version() is the library's. */
#define TOMBOLO_ABI_VERSION 1

/* How a call, or another function, ended. */
typedef enum tombolo_status {
    TOMBOLO_OK = 0,
    /* tombolo_poll: the answer has not come yet. tombolo_wait_any: none has come within the time. */
    TOMBOLO_PENDING = 1,

    /* A call ended, in one of these ways. */
    TOMBOLO_LATE = 2,            /* its deadline had passed before the service could begin: it was not served */
    TOMBOLO_REFUSED = 3,         /* not accepted; tombolo_error_refusal() says why */
    TOMBOLO_CANCELLED = 4,       /* cancelled before it was served */
    TOMBOLO_EXPIRED = 5,         /* it waited for longer than its time to live */
    TOMBOLO_FAILED = 6,          /* the service's handler broke, or said that it failed */
    TOMBOLO_PROVIDER_GONE = 7,   /* the service died or ended; whether the call was served is not known */
    TOMBOLO_TIMEOUT = 8,         /* the caller's own patience ended before the deadline; whether it was served is not known */
    TOMBOLO_BROKEN = 9,          /* the service broke the protocol; the connection is of no use any more */

    /* A call could not be made, or its reply not be read. */
    TOMBOLO_BUSY = 10,           /* as many calls are under way as the connection allows */
    TOMBOLO_MEMORY = 11,         /* the system has no memory */
    TOMBOLO_SHARE = 12,          /* the service takes no more memory, or no such large one */
    TOMBOLO_RANGE = 13,          /* a part that the buffer does not have */
    TOMBOLO_RECLAIMED = 14,      /* the reply was held for too long; what was read of it since is void */
    TOMBOLO_REPLY_MEMORY = 15,   /* the reply is in memory that the service did not hand over */
    TOMBOLO_UNKNOWN_CALL = 16,   /* no call of that token is under way */

    /* There is no connection. */
    TOMBOLO_NO_SERVICE = 17,     /* no service has this name */
    TOMBOLO_DENIED = 18,         /* the service does not let us in, or has no room */
    TOMBOLO_SILENT = 19,         /* it took the connection and said nothing */
    TOMBOLO_CONNECT_GONE = 20,   /* it went away while we connected */
    TOMBOLO_PROTOCOL = 21,       /* the other side speaks another protocol */
    TOMBOLO_SECTION = 22,        /* its memory is not as it should be; nor is a memfd that is to be a buffer */

    /* The name of a service, its folder, its options. */
    TOMBOLO_NAME = 23,           /* not a name: 1 to 64 of a-z A-Z 0-9 . _ -, the first not a dot */
    TOMBOLO_NO_PLACE = 24,       /* neither TOMBOLO_RUNTIME nor XDG_RUNTIME_DIR is set, and this is not root */
    TOMBOLO_RUNNING = 25,        /* somebody serves under the name already */
    TOMBOLO_LONG_PATH = 26,      /* the socket's path has more than 107 bytes */
    TOMBOLO_OPTION = 27,         /* an option that makes no sense; the text says which */
    TOMBOLO_SYSTEM = 28,         /* the system refused; the text says what */

    /* This library was used wrongly, or is broken. */
    TOMBOLO_ARGUMENT = 29,       /* a null pointer, text that is not UTF-8, a struct of unknown size, a descriptor that is not open */
    TOMBOLO_UNKNOWN_HANDLE = 30, /* closed already, of another kind, or never given out */
    TOMBOLO_NO_ROOM = 31,        /* no room for the loan or the reply now; or the caller's buffer is too small */
    TOMBOLO_IN_HANDLER = 32,     /* not from within a handler */
    TOMBOLO_PANIC = 33,          /* a bug of the library's, caught */

    /* A call again. */
    TOMBOLO_REPLY_TOO_LARGE = 34, /* the reply is in memory beyond the connection's max_shared_bytes, and was not taken; the connection goes on */
    TOMBOLO_DEADLINE_EXCEEDED = 35 /* the deadline passed without an answer; whether it was served is not known */
} tombolo_status;

/* Why a call was refused. */
typedef enum tombolo_refusal {
    TOMBOLO_REFUSAL_NONE = 0,
    TOMBOLO_REFUSAL_QUEUE_FULL = 1,   /* the service's queue is full */
    TOMBOLO_REFUSAL_ADMISSION = 2,    /* the deadline cannot be met beside what is queued */
    TOMBOLO_REFUSAL_MEMORY = 3,       /* the payload's memory is unknown, not sealed, too short, or beyond the service's bounds */
    TOMBOLO_REFUSAL_REPLY_MEMORY = 4, /* the reply does not fit into the connection's reply memory */
    TOMBOLO_REFUSAL_STOPPING = 5      /* the service is ending */
} tombolo_refusal;

/* A connection to a service. */
typedef struct tombolo_client { uint64_t id; } tombolo_client;
/* What a call brought back. */
typedef struct tombolo_reply { uint64_t id; } tombolo_reply;
/* Room for a request in the connection's memory. */
typedef struct tombolo_loan { uint64_t id; } tombolo_loan;
/* Memory that is written here and read by services, without a copy. */
typedef struct tombolo_buffer { uint64_t id; } tombolo_buffer;
/* A service that runs. */
typedef struct tombolo_service { uint64_t id; } tombolo_service;
/* A call under way, of the client that gave it. */
typedef uint64_t tombolo_token;

/* ---- in general ------------------------------------------------------------------------------------------------ */

/* TOMBOLO_ABI_VERSION of the library. */
uint32_t tombolo_abi_version(void);
/* A status as one word, as all languages write it ("provider-gone"); "unknown" for any other number. Never freed. */
const char *tombolo_status_name(int32_t status);
/* The last failure of this thread in words; "" before the first. Valid until this thread's next failure. */
const char *tombolo_error_text(void);
/* Why, where the last failure of this thread was TOMBOLO_REFUSED; a tombolo_refusal. */
int32_t tombolo_error_refusal(void);
/* Now, on the clock of deadlines. */
uint64_t tombolo_now_ns(void);

/* ---- clients --------------------------------------------------------------------------------------------------- */

/* For sizes and times that can be 0: none at all, where 0 is the default. */
#define TOMBOLO_NONE UINT64_MAX

typedef enum tombolo_polling {
    TOMBOLO_POLLING_ADAPTIVE = 0, /* as it gains */
    TOMBOLO_POLLING_NEVER = 1,    /* each wait sleeps at once */
    TOMBOLO_POLLING_ALWAYS = 2    /* until something comes: the fastest, at the price of a CPU */
} tombolo_polling;

typedef struct tombolo_connect_options {
    uint32_t size;        /* of this struct */
    uint32_t entries;     /* most calls under way: a power of two up to 4096; default 64 */
    uint64_t arena_bytes; /* for requests above 192 bytes: a power of two from 4096, or TOMBOLO_NONE; default 1 MiB */
    uint64_t max_shared_bytes; /* of the service's whole memories at a time, replies that are held included; default 4 GiB, TOMBOLO_NONE for none */
    uint64_t patience_ns; /* how long the service may take to answer; default 5 s */
    uint32_t polling;     /* a tombolo_polling */
    uint32_t reserved;    /* 0 */
    const char *folder;   /* of sockets; default the user's own */
} tombolo_connect_options;
#define TOMBOLO_CONNECT_OPTIONS_INIT { sizeof(tombolo_connect_options), 0, 0, 0, 0, 0, 0, NULL }

typedef enum tombolo_deadline {
    TOMBOLO_DEADLINE_INHERIT = 0, /* that of the request which this thread serves, if it serves one; else none */
    TOMBOLO_DEADLINE_WITHIN = 1,  /* this many ns after the call; or the inherited one, if that is earlier */
    TOMBOLO_DEADLINE_AT = 2       /* at an instant; or the inherited one, if that is earlier */
} tombolo_deadline;

typedef struct tombolo_call_options {
    uint32_t size;          /* of this struct */
    uint32_t deadline_kind; /* a tombolo_deadline: what the next field means */
    uint64_t deadline_ns;   /* any */
    uint64_t timeout_ns;    /* how long the caller waits where the deadline is later or there is none; default 30 s (or a deadline WITHIN that is longer), TOMBOLO_NONE without end */
    uint64_t ttl_ns;        /* how long the request may wait at the service, in whole ms; default the service's choice */
    uint64_t trace;         /* carried to the service */
    uint64_t wait_late_ns;  /* for how long after the deadline a late reply is waited for; 0: the call ends at its deadline, TOMBOLO_DEADLINE_EXCEEDED */
} tombolo_call_options;
#define TOMBOLO_CALL_OPTIONS_INIT { sizeof(tombolo_call_options), 0, 0, 0, 0, 0, 0 }

/* Connects to the service of that name. */
int32_t tombolo_connect(const char *name, const tombolo_connect_options *options, tombolo_client *client);
/* Closes it. The connection ends when no other thread is in a call with it; replies and loans stay valid. */
int32_t tombolo_close(tombolo_client client);

/* Calls and waits for the reply, which is to be freed. */
int32_t tombolo_call(tombolo_client client, const void *data, size_t len, const tombolo_call_options *options, tombolo_reply *reply);
/* Calls without waiting. */
int32_t tombolo_submit(tombolo_client client, const void *data, size_t len, const tombolo_call_options *options, tombolo_token *token);
/* Looks for the answer: TOMBOLO_PENDING while there is none. After any other status the token names nothing any more. */
int32_t tombolo_poll(tombolo_client client, tombolo_token token, tombolo_reply *reply);
/* Waits for the answer; after timeout_ns (TOMBOLO_NONE: without end) the call is cancelled: TOMBOLO_TIMEOUT. At its deadline it ends in any case:
 * TOMBOLO_DEADLINE_EXCEEDED. */
int32_t tombolo_wait(tombolo_client client, tombolo_token token, uint64_t timeout_ns, tombolo_reply *reply);
/* Waits until the answer of one of these calls, or its end at its deadline, is there to be polled, and says which; else TOMBOLO_PENDING. */
int32_t tombolo_wait_any(tombolo_client client, const tombolo_token *tokens, size_t count, uint64_t timeout_ns, size_t *which);
/* How one of several calls ended. */
typedef struct tombolo_end {
    int32_t status;      /* TOMBOLO_OK, or why not */
    int32_t refusal;     /* a tombolo_refusal: why, where that is TOMBOLO_REFUSED */
    tombolo_reply reply; /* of TOMBOLO_OK, to be freed; else 0 */
} tombolo_end;

/* Waits for the answers of all these calls, and writes how each ended, in the order of the tokens: count of them, also where none ended
 * well. Those whose answer has not come after timeout_ns are cancelled, and end with TOMBOLO_TIMEOUT, or earlier with
 * TOMBOLO_DEADLINE_EXCEEDED. */
int32_t tombolo_wait_all(tombolo_client client, const tombolo_token *tokens, size_t count, uint64_t timeout_ns, tombolo_end *ends);
/* Asks the service to take a call back. Its answer still comes: TOMBOLO_CANCELLED, or what it was if service had begun. */
int32_t tombolo_cancel(tombolo_client client, tombolo_token token);

/* Room for a request of len bytes, to be written in place; TOMBOLO_NO_ROOM where there is none now. The pointer is valid until
 * the loan is sent or freed. */
int32_t tombolo_loan_new(tombolo_client client, uint64_t len, tombolo_loan *loan, void **data);
/* Sends it, without waiting. The loan is used up, also where that fails. */
int32_t tombolo_loan_submit(tombolo_client client, tombolo_loan loan, const tombolo_call_options *options, tombolo_token *token);
/* Gives it back unsent. */
int32_t tombolo_loan_free(tombolo_loan loan);

/* Zeroed memory of this many bytes, to GiB; with populate not 0 its pages are there at once. The pointer is valid until it is freed. */
int32_t tombolo_buffer_new(uint64_t bytes, int32_t populate, tombolo_buffer *buffer, void **data);
/* The memory of a memfd that is there already, whole. It has a size and is sealed against shrinking and growing (F_SEAL_SHRINK, F_SEAL_GROW), or it
 * is TOMBOLO_SECTION; the descriptor stays the caller's, who may close it. bytes is its size. The pointer is for reading, and for writing too where
 * writable is not 0: not so where it is sealed against writing (F_SEAL_WRITE), which keeps its readers from seeing it change. */
int32_t tombolo_buffer_of_memfd(int32_t fd, tombolo_buffer *buffer, void **data, uint64_t *bytes, int32_t *writable);
/* Sends a part of it, without waiting and without a copy; it must not be written before the answer. */
int32_t tombolo_buffer_submit(tombolo_client client, tombolo_buffer buffer, uint64_t offset, uint64_t len, const tombolo_call_options *options, tombolo_token *token);
/* Frees it. Where calls of it are under way the memory goes with the last of them, but not for the caller. */
int32_t tombolo_buffer_free(tombolo_buffer buffer);

typedef struct tombolo_reply_info {
    const void *data;    /* where the bytes are, until the reply is freed; not null */
    uint64_t len;        /* how many */
    uint64_t queued_ns;  /* how long the request waited at the service */
    uint64_t service_ns; /* how long it was served */
    uint32_t code;       /* the application's; 0 is success */
    uint32_t late;       /* 1: it came after the call's deadline (wait_late_ns) */
} tombolo_reply_info;

/* What the reply is. The service may change the bytes of a large one, and takes them back when they are held for too long. */
int32_t tombolo_reply_get(tombolo_reply reply, tombolo_reply_info *info);
/* Whether what was read until now was this reply's: TOMBOLO_RECLAIMED once the service has taken it back. */
int32_t tombolo_reply_check(tombolo_reply reply);
/* Copies all the bytes and checks; TOMBOLO_NO_ROOM where there are more than room. copied is written in both cases: how many
 * there are. */
int32_t tombolo_reply_copy(tombolo_reply reply, void *to, size_t room, size_t *copied);
/* Frees it, and gives its memory back to the service. */
int32_t tombolo_reply_free(tombolo_reply reply);

/* The report of any running service as JSON, as `tombolo service stats NAME --json` prints it, with a 0 at its end.
 * TOMBOLO_NO_ROOM where it has more than room bytes, the 0 counted; needed is written in both cases. */
int32_t tombolo_report(const char *name, const tombolo_connect_options *options, char *to, size_t room, size_t *needed);

/* ---- services -------------------------------------------------------------------------------------------------- */

typedef enum tombolo_worker_class {
    TOMBOLO_CLASS_NORMAL = 0,
    TOMBOLO_CLASS_FIFO = 1,    /* SCHED_FIFO with fifo_priority */
    TOMBOLO_CLASS_DEADLINE = 2 /* SCHED_DEADLINE: budget_ns in each period_ns */
} tombolo_worker_class;

typedef enum tombolo_late_policy {
    TOMBOLO_LATE_REFUSE = 0,     /* answered as late, unserved */
    TOMBOLO_LATE_BEST_EFFORT = 1 /* served after all that can still be in time */
} tombolo_late_policy;

typedef enum tombolo_order {
    TOMBOLO_ORDER_EDF = 0,                /* earliest absolute deadline first, best effort last */
    TOMBOLO_ORDER_FIFO = 1,               /* as they come */
    TOMBOLO_ORDER_DEADLINE_MONOTONIC = 2  /* the less time from arrival to deadline, the sooner; best effort last */
} tombolo_order;

typedef struct tombolo_service_options {
    uint32_t size;              /* of this struct */
    uint32_t workers;           /* threads that serve; default 1 */
    uint32_t worker_class;      /* a tombolo_worker_class; what is in force is in the report */
    uint32_t fifo_priority;     /* 1 to 99 */
    uint64_t budget_ns;         /* one request takes at most; default 1 ms */
    uint64_t period_ns;         /* default 10 ms */
    uint64_t queue_bound;       /* most requests that wait; default 16384 */
    uint32_t late_policy;       /* a tombolo_late_policy */
    uint32_t admission;         /* not 0: what cannot be met is refused at once */
    const uint32_t *uids;       /* users that may call, besides root and the user of the service */
    size_t uid_count;
    const uint32_t *gids;       /* of a caller, the group that it runs as and those that it is a member of besides */
    size_t gid_count;
    uint32_t everybody;         /* not 0: everybody who can reach the folder may call */
    uint32_t polling;           /* a tombolo_polling */
    uint32_t max_clients;       /* default 256 */
    uint32_t max_entries;       /* requests under way of one client, up to 4096; default 1024 */
    uint64_t max_arena_bytes;   /* of a client's arena; default 64 MiB */
    uint64_t reply_arena_bytes; /* for each client's replies: a power of two from 4096 to 64 MiB, or TOMBOLO_NONE; default 1 MiB */
    uint64_t max_shared_bytes;  /* of the whole memories of one client; default 4 GiB, TOMBOLO_NONE for none */
    uint64_t ttl_ns;            /* of a request that says nothing else; default 60 s */
    uint64_t reply_ttl_ns;      /* how long a client may hold a reply; default 60 s */
    uint64_t slow_ns;           /* calls that take longer are in the report; default 10 ms */
    uint32_t order;             /* a tombolo_order */
    uint32_t max_clients_per_uid; /* so that no user keeps the others out; default 128 */
    uint64_t max_bytes_per_uid; /* of all memory that the clients of one user have in use together; default 16 GiB */
    uint64_t max_entries_per_uid; /* requests under way of all clients of one user; default 8192 */
    const char *folder;         /* of sockets; default the user's own */
} tombolo_service_options;
#define TOMBOLO_SERVICE_OPTIONS_INIT \
    { sizeof(tombolo_service_options), 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL }

/* A request that is being served; valid until its handler returns. */
typedef struct tombolo_request {
    const void *data;     /* the bytes, where they are; not null. The client can change those of a large request */
    uint64_t len;         /* how many */
    uint64_t deadline_ns; /* an instant; UINT64_MAX for best effort */
    uint64_t trace;       /* the client's */
    uint64_t queued_ns;   /* how long it waited */
    uint32_t pid;         /* who calls, as the kernel says */
    uint32_t uid;
    uint32_t gid;
    uint32_t reserved;
} tombolo_request;

/* The answer to the request that this thread serves; of use only within its handler, in its thread. */
typedef struct tombolo_answer tombolo_answer;

/* Serves one request. Called by the service's workers, several at a time. 0 sends the answer, which is empty unless something was
 * put in; anything else is TOMBOLO_FAILED for the caller. Calls that it makes inherit what is left of the request's deadline. */
typedef int32_t (*tombolo_handler)(void *context, const tombolo_request *request, tombolo_answer *answer);

/* Copies len bytes into the answer, in place of what it held. TOMBOLO_NO_ROOM where the client's reply memory is full: the call is
 * answered as refused unless something else is put in. */
int32_t tombolo_answer_write(tombolo_answer *answer, const void *data, size_t len);
/* Room for an answer of len bytes, to be written in place until the handler returns; else as tombolo_answer_write. */
int32_t tombolo_answer_loan(tombolo_answer *answer, uint64_t len, void **data);
/* Answers with a part of our own memory, which the client reads where it is. */
int32_t tombolo_answer_share(tombolo_answer *answer, tombolo_buffer buffer, uint64_t offset, uint64_t len);
/* The application's code; 0, which it is unless set, is success. */
int32_t tombolo_answer_code(tombolo_answer *answer, uint32_t code);

/* Registers a service and serves in threads of its own until it is stopped, or the process ends. */
int32_t tombolo_register(const char *name, const tombolo_service_options *options, tombolo_handler handler, void *context, tombolo_service *service);
/* Ends it: handlers under way are waited for, what waits is refused, and after that the handler is not called any more.
 * TOMBOLO_IN_HANDLER where a handler calls it. */
int32_t tombolo_stop(tombolo_service service);

typedef struct tombolo_stats {
    uint32_t size;                 /* of this struct, set by the caller */
    uint32_t reserved;
    uint64_t uptime_ns;
    uint64_t clients;              /* connected */
    uint64_t broken_clients;       /* disconnected because they broke the protocol */
    uint64_t refused_connections;
    uint64_t pending;              /* requests that wait */
    uint64_t served;               /* answers since the service began, by their kind */
    uint64_t overran;              /* of those served: done after their deadline */
    uint64_t late;
    uint64_t refused_queue_full;
    uint64_t refused_admission;
    uint64_t refused_memory;
    uint64_t refused_reply_memory;
    uint64_t refused_stopping;
    uint64_t cancelled;
    uint64_t expired;
    uint64_t failed;
    uint64_t abandoned;            /* their client had gone before the answer */
    uint64_t reclaimed_replies;    /* held for too long and reclaimed */
    uint64_t queued_p50_ns;        /* from when a request was seen to when its service began */
    uint64_t queued_p99_ns;
    uint64_t queued_max_ns;
    uint64_t service_p50_ns;       /* how long requests were served */
    uint64_t service_p99_ns;
    uint64_t service_max_ns;
} tombolo_stats;

/* Counters and times of a service of this process. */
int32_t tombolo_service_stats(tombolo_service service, tombolo_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
