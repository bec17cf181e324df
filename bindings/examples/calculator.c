/*
 * A service that calculates, and its client, in C. calculator.rs, calculator.cpp and calculator.py are the same in other languages.
 *
 *     calculator [--name NAME] [--delay-ms MS]                              serves; each calculation takes so long
 *     calculator [--name NAME] [--within-ms MS] [--timeout-ms MS] 'A + B'   calls
 *
 * A request is "A + B", with + - * or / and decimal numbers; the reply is the result with at most six decimals. Codes: 1 where the
 * request was not understood, 2 for a division by zero; the reply then says so in words.
 * A client ends with 0 and the result, with 1 and "code N: WORDS", or with 2 and "error: STATUS".
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tombolo.h"

#define NOT_UNDERSTOOD 1
#define DIVISION_BY_ZERO 2
#define LONGEST 200

/* Reads a decimal number, which takes the whole word; strtod alone would take "inf" and "0x10", too. */
static int number(const char *word, double *value) {
    char *end;
    *value = strtod(word, &end);
    return *word != 0 && *end == 0 && word[strspn(word, "0123456789.eE+-")] == 0;
}

/* Calculates; writes the reply's text and returns its code. */
static uint32_t calculate(const char *text, char *to, size_t room) {
    char a_word[LONGEST + 1], operator[LONGEST + 1], b_word[LONGEST + 1], more[2];
    double a, b, result = 0;
    int fine = sscanf(text, "%200s %200s %200s %1s", a_word, operator, b_word, more) == 3 && number(a_word, &a) && number(b_word, &b)
        && strlen(operator) == 1;
    switch (fine ? *operator : 0) {
        case '+': result = a + b; break;
        case '-': result = a - b; break;
        case '*': result = a * b; break;
        case '/':
            if (b == 0) {
                snprintf(to, room, "division by zero");
                return DIVISION_BY_ZERO;
            }
            result = a / b;
            break;
        default:
            snprintf(to, room, "expected \"A + B\", with + - * or /");
            return NOT_UNDERSTOOD;
    }
    snprintf(to, room, "%.6f", result);
    if (strchr(to, '.') != NULL) {
        char *last = to + strlen(to) - 1;
        while (*last == '0') *last-- = 0;
        if (*last == '.') *last = 0;
    }
    return 0;
}

static int32_t serve(void *context, const tombolo_request *request, tombolo_answer *answer) {
    const long delay_ms = *(const long *)context;
    char text[LONGEST + 1] = "", result[512];
    if (request->len <= LONGEST) memcpy(text, request->data, request->len);
    if (delay_ms > 0) {
        struct timespec delay = { delay_ms / 1000, delay_ms % 1000 * 1000000 };
        puts("working");
        fflush(stdout);
        nanosleep(&delay, NULL);
    }
    tombolo_answer_code(answer, calculate(text, result, sizeof result));
    /* No room for the reply is answered as such. */
    tombolo_answer_write(answer, result, strlen(result));
    return 0;
}

static int failed(int32_t status) {
    printf("error: %s\n", tombolo_status_name(status));
    fprintf(stderr, "%s\n", tombolo_error_text());
    return 2;
}

static int call(const char *name, const char *text, const tombolo_call_options *options) {
    tombolo_client client;
    tombolo_reply reply;
    tombolo_reply_info info;
    char bytes[512];
    size_t copied;
    int32_t status = tombolo_connect(name, NULL, &client);
    if (status != TOMBOLO_OK) return failed(status);
    status = tombolo_call(client, text, strlen(text), options, &reply);
    if (status == TOMBOLO_OK) status = tombolo_reply_get(reply, &info);
    if (status == TOMBOLO_OK) status = tombolo_reply_copy(reply, bytes, sizeof bytes, &copied);
    if (status != TOMBOLO_OK) return failed(status);
    if (info.code != 0) printf("code %u: ", (unsigned)info.code);
    printf("%.*s\n", (int)copied, bytes);
    tombolo_reply_free(reply);
    tombolo_close(client);
    return info.code == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    const char *name = "calculator", *text = NULL;
    static long delay_ms = 0;
    tombolo_call_options options = TOMBOLO_CALL_OPTIONS_INIT;
    options.deadline_kind = TOMBOLO_DEADLINE_WITHIN;
    options.deadline_ns = 5000000;
    for (int at = 1; at < argc; at++) {
        const int has_value = at + 1 < argc;
        if (has_value && strcmp(argv[at], "--name") == 0) name = argv[++at];
        else if (has_value && strcmp(argv[at], "--delay-ms") == 0) delay_ms = atol(argv[++at]);
        else if (has_value && strcmp(argv[at], "--within-ms") == 0) options.deadline_ns = strtoull(argv[++at], NULL, 10) * 1000000;
        else if (has_value && strcmp(argv[at], "--timeout-ms") == 0) options.timeout_ns = strtoull(argv[++at], NULL, 10) * 1000000;
        else if (strncmp(argv[at], "--", 2) == 0) {
            fprintf(stderr, "%s: expected [--name NAME] [--delay-ms MS] to serve, [--name NAME] [--within-ms MS] [--timeout-ms MS] 'A + B' to call\n", argv[at]);
            return 2;
        } else text = argv[at];
    }
    if (text != NULL) return call(name, text, &options);

    tombolo_service service;
    tombolo_service_options how = TOMBOLO_SERVICE_OPTIONS_INIT;
    how.workers = 2;
    how.budget_ns = 50000;
    how.admission = 1;
    const int32_t status = tombolo_register(name, &how, serve, &delay_ms, &service);
    if (status != TOMBOLO_OK) return failed(status);
    puts("serving");
    fflush(stdout);
    for (;;) pause();
}
