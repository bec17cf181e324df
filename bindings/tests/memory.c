/*
 * Tests of whole memories from C: a memfd as a buffer, and a bound on what a service hands over. Prints the name of each test that passed; ends with 1 at the first
 * that fails.
 *
 *     memory FOLDER     the folder of sockets
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tombolo.h"

#define BYTES 300000
#define TEXT "there already"
#define PATIENCE_NS UINT64_C(20000000000)

#define EXPECT(condition)                                                                             \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "%s:%d: expected %s; last failure: %s\n", __FILE__, __LINE__, #condition, tombolo_error_text()); \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

static const char *folder;

/* Answers with the buffer that the context names; where it names none, with the request. */
static int32_t serve(void *context, const tombolo_request *request, tombolo_answer *answer) {
    const tombolo_buffer *buffer = context;
    if (buffer->id != 0) return tombolo_answer_share(answer, *buffer, 0, BYTES);
    return tombolo_answer_write(answer, request->data, request->len);
}

static tombolo_service start(tombolo_buffer *answered) {
    tombolo_service service;
    tombolo_service_options options = TOMBOLO_SERVICE_OPTIONS_INIT;
    options.folder = folder;
    EXPECT(tombolo_register("memory", &options, serve, answered, &service) == TOMBOLO_OK);
    return service;
}

static tombolo_client connect_to_it(uint64_t max_shared_bytes) {
    tombolo_client client;
    tombolo_connect_options options = TOMBOLO_CONNECT_OPTIONS_INIT;
    options.folder = folder;
    options.max_shared_bytes = max_shared_bytes;
    EXPECT(tombolo_connect("memory", &options, &client) == TOMBOLO_OK);
    return client;
}

/* A memfd of zeros that ends with the text. */
static int memfd(off_t bytes, int seals) {
    const int fd = memfd_create("theirs", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(fd >= 0 && ftruncate(fd, bytes) == 0);
    if (bytes > 0) EXPECT(pwrite(fd, TEXT, strlen(TEXT), bytes - (off_t)strlen(TEXT)) == (ssize_t)strlen(TEXT));
    EXPECT(fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void a_memfd_is_sent_and_answered_whole(void) {
    tombolo_buffer answered = { 0 };
    const tombolo_service service = start(&answered);
    const tombolo_client client = connect_to_it(0);
    const int seals[] = { F_SEAL_SHRINK | F_SEAL_GROW, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE };
    for (int at = 0; at < 2; at++) {
        tombolo_buffer buffer;
        tombolo_token token;
        tombolo_reply reply;
        tombolo_reply_info info;
        void *data;
        uint64_t bytes;
        int32_t writable;
        const int fd = memfd(BYTES, seals[at]);
        EXPECT(tombolo_buffer_of_memfd(fd, &buffer, &data, &bytes, &writable) == TOMBOLO_OK);
        EXPECT(close(fd) == 0);
        EXPECT(bytes == BYTES && (writable != 0) == (at == 0));
        EXPECT(memcmp((char *)data + BYTES - strlen(TEXT), TEXT, strlen(TEXT)) == 0);
        if (writable) memcpy(data, "head", 4);
        EXPECT(tombolo_buffer_submit(client, buffer, 0, 4, NULL, &token) == TOMBOLO_OK);
        EXPECT(tombolo_wait(client, token, PATIENCE_NS, &reply) == TOMBOLO_OK);
        EXPECT(tombolo_reply_get(reply, &info) == TOMBOLO_OK && info.len == 4);
        EXPECT(memcmp(info.data, writable ? "head" : "\0\0\0\0", 4) == 0);
        EXPECT(tombolo_reply_free(reply) == TOMBOLO_OK);
        answered = buffer;
        EXPECT(tombolo_call(client, NULL, 0, NULL, &reply) == TOMBOLO_OK);
        answered.id = 0;
        EXPECT(tombolo_reply_get(reply, &info) == TOMBOLO_OK && info.len == BYTES);
        EXPECT(memcmp((const char *)info.data + BYTES - strlen(TEXT), TEXT, strlen(TEXT)) == 0);
        EXPECT(tombolo_reply_free(reply) == TOMBOLO_OK && tombolo_buffer_free(buffer) == TOMBOLO_OK);
    }
    EXPECT(tombolo_close(client) == TOMBOLO_OK && tombolo_stop(service) == TOMBOLO_OK);
}

static void what_is_no_sealed_memfd_is_told_with_what_it_should_be(void) {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    const struct {
        int fd;
        int32_t status;
        const char *text;
    } cases[] = {
        { memfd(BYTES, 0), TOMBOLO_SECTION, "no seals, expected seals SHRINK and GROW" },
        { memfd(BYTES, F_SEAL_GROW), TOMBOLO_SECTION, "seals GROW, expected seals SHRINK and GROW" },
        { memfd(0, F_SEAL_SHRINK | F_SEAL_GROW), TOMBOLO_SECTION, "0 bytes" },
        { ends[0], TOMBOLO_SECTION, "expected a memfd" },
        { -1, TOMBOLO_ARGUMENT, "-1, expected an open descriptor" },
        { 1000000, TOMBOLO_ARGUMENT, "1000000, expected an open descriptor" },
    };
    for (size_t at = 0; at < sizeof cases / sizeof *cases; at++) {
        tombolo_buffer buffer = { 1 };
        void *data = &buffer;
        uint64_t bytes = 1;
        int32_t writable = 1;
        EXPECT(tombolo_buffer_of_memfd(cases[at].fd, &buffer, &data, &bytes, &writable) == cases[at].status);
        EXPECT(strstr(tombolo_error_text(), cases[at].text) != NULL);
        EXPECT(buffer.id == 0 && data == NULL && bytes == 0 && writable == 0);
        EXPECT(tombolo_buffer_of_memfd(cases[at].fd, &buffer, &data, NULL, &writable) == TOMBOLO_ARGUMENT);
        if (at < 3) close(cases[at].fd);
    }
    close(ends[0]);
    close(ends[1]);
}

static void a_reply_beyond_what_the_connection_takes_is_told_apart(void) {
    tombolo_buffer answered;
    tombolo_reply reply;
    void *data;
    const uint64_t bounds[] = { BYTES - 1, TOMBOLO_NONE, BYTES };
    EXPECT(tombolo_buffer_new(BYTES, 0, &answered, &data) == TOMBOLO_OK);
    const tombolo_service service = start(&answered);
    for (int at = 0; at < 3; at++) {
        const tombolo_client client = connect_to_it(bounds[at]);
        /* Twice: the connection goes on. */
        for (int n = 0; n < 2; n++) {
            const int32_t status = tombolo_call(client, NULL, 0, NULL, &reply);
            EXPECT(status == (bounds[at] == BYTES ? TOMBOLO_OK : TOMBOLO_REPLY_TOO_LARGE));
            if (status == TOMBOLO_OK) EXPECT(tombolo_reply_free(reply) == TOMBOLO_OK);
            else EXPECT(reply.id == 0 && strstr(tombolo_error_text(), "memory of 300000 bytes, 0 of") != NULL);
        }
        EXPECT(tombolo_close(client) == TOMBOLO_OK);
    }
    EXPECT(tombolo_stop(service) == TOMBOLO_OK && tombolo_buffer_free(answered) == TOMBOLO_OK);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    folder = argv[1];
    a_memfd_is_sent_and_answered_whole();
    puts("a_memfd_is_sent_and_answered_whole");
    what_is_no_sealed_memfd_is_told_with_what_it_should_be();
    puts("what_is_no_sealed_memfd_is_told_with_what_it_should_be");
    a_reply_beyond_what_the_connection_takes_is_told_apart();
    puts("a_reply_beyond_what_the_connection_takes_is_told_apart");
    return 0;
}
