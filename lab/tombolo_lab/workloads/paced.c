/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paced traffic: numbered and timed datagrams and messages at an exact rate, and the sink that counts them.
 * One static program, for this host and for guests that have no interpreter. `./x lab-tools` builds it.
 *
 *   paced send udp|tcp HOST PORT BYTES RATE SECONDS   to a sink: this program's, or the server of iperf 2
 *   paced trip udp|tcp HOST PORT BYTES RATE SECONDS   to an echo server (RFC 862): what came back, and when
 *   paced sink udp|tcp PORT [BUFFER [latency]]        counts until it is killed; BUFFER: bytes of SO_RCVBUF, 0: default
 *
 * RATE is in datagrams or writes a second; 0 is as fast as it goes. send and trip print one JSON object. The UDP sink
 * prints one for each sender that has ended. Numbers in it are counts, seconds, or µs where the name says so.
 *
 * Rate: number i (from 0) is due at start + i / RATE on CLOCK_MONOTONIC. What is due when the program wakes goes at
 * once, in one system call, so a late wake-up changes the spacing and never the rate. `late_us` is the greatest
 * lateness. A sender that cannot keep up ends 50 ms after its time with fewer sent than `due`.
 *
 * Numbers: a datagram begins as one of iperf 2, with its number (from 1; negative at the end), its time in µs and a
 * client header that asks for nothing. A message of a stream begins with the same words. What the numbers say is
 * missing is lost. A number that comes twice counts once, and as a duplicate. Jitter is that of RFC 3550, 6.4.1.
 *
 * Times: a round trip of a datagram begins when it is sent; one of a TCP message when it was due, so that time which
 * it waits for room in the socket counts. The sink's latency (udp, with that word) is one way, and right only where both
 * ends have one clock (namespaces of one host). Percentiles are exact (nearest rank) over all values.
 *
 * Limits: one flow; 16,777,215 numbers; datagrams of 40 to 65,507 bytes, messages from 16 bytes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/tcp.h>
#include <math.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEAD_BYTES 16
#define REPORT_BYTES 40
#define LEAST_DATAGRAM 40
#define MOST_BYTES 65507
#define BATCH 64
#define MOST_NUMBERS (1u << 24)
/* Values that are printed; evenly spaced ranks where there are more. */
#define MOST_VALUES 2000
#define SOCKET_BYTES (4 << 20)
#define LATE_NS 50000000
#define GRACE_NS 1000000000
#define END_TRIES 12
#define END_WAIT_MS 250
#define SECOND_NS 1000000000ull
/* Flags of iperf 2's headers. */
#define VERSION_1 0x80000000u
#define NUMBER_64 0x08000000u

static void fail(const char *format, ...)
{
	va_list words;

	fputs("paced: ", stderr);
	va_start(words, format);
	vfprintf(stderr, format, words);
	va_end(words);
	fputc('\n', stderr);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

static void *zeroed(size_t count, size_t bytes)
{
	void *made = calloc(count, bytes);

	if (!made)
		fail("no memory for %zu x %zu bytes", count, bytes);
	return made;
}

/* ---- heads and reports ------------------------------------------------------------------------------------------- */
static uint32_t word(const unsigned char *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return be32toh(value);
}

static void put(unsigned char *at, uint32_t value)
{
	value = htobe32(value);
	memcpy(at, &value, sizeof(value));
}

static void put_head(unsigned char *at, int64_t number, uint64_t ns)
{
	put(at, (uint32_t)number);
	put(at + 4, (uint32_t)(ns / SECOND_NS));
	put(at + 8, (uint32_t)(ns % SECOND_NS / 1000));
	put(at + 12, (uint32_t)((uint64_t)number >> 32));
}

static int64_t number_of(const unsigned char *at)
{
	return (int64_t)((uint64_t)word(at + 12) << 32 | word(at));
}

static uint64_t us_of(const unsigned char *at)
{
	return (uint64_t)word(at + 4) * 1000000 + word(at + 8);
}

/* ---- values ------------------------------------------------------------------------------------------------------ */
/* Times in ns, up to 4.29 s; longer ones count as that. */
struct values {
	uint32_t *ns;
	size_t count;
};

static void values_add(struct values *values, uint64_t ns)
{
	if (!values->ns)
		values->ns = zeroed(MOST_NUMBERS, sizeof(*values->ns));
	if (values->count < MOST_NUMBERS)
		values->ns[values->count++] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

static int ascending(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

/* The nearest rank of a sorted list. */
static double percentile_us(const struct values *values, double part)
{
	double rank = ceil(part * (double)values->count - 1e-9);

	return values->ns[rank < 1 ? 0 : (size_t)rank - 1] / 1e3;
}

/* `, "NAME": {percentiles}, "NAME_values": [...]`, or null where there are none. Sorts. */
static void print_values(const char *name, struct values *values, int with_all)
{
	double sum = 0;
	size_t shown = values->count < MOST_VALUES ? values->count : MOST_VALUES;

	if (!values->count) {
		printf(", \"%s\": null", name);
		return;
	}
	qsort(values->ns, values->count, sizeof(*values->ns), ascending);
	for (size_t i = 0; i < values->count; i++)
		sum += values->ns[i];
	printf(", \"%s\": {\"count\": %zu, \"min\": %.3f, \"mean\": %.3f, \"p50\": %.3f, \"p90\": %.3f, \"p99\": %.3f, "
	       "\"p999\": %.3f, \"p9999\": %.3f, \"max\": %.3f}",
	       name, values->count, values->ns[0] / 1e3, sum / (double)values->count / 1e3, percentile_us(values, 0.5),
	       percentile_us(values, 0.9), percentile_us(values, 0.99), percentile_us(values, 0.999),
	       percentile_us(values, 0.9999), values->ns[values->count - 1] / 1e3);
	if (!with_all)
		return;
	printf(", \"%s_values\": [", name);
	for (size_t i = 0; i < shown; i++)
		printf("%s%.1f", i ? ", " : "", values->ns[shown < 2 ? 0 : i * (values->count - 1) / (shown - 1)] / 1e3);
	printf("]");
}

/* ---- counting ---------------------------------------------------------------------------------------------------- */
/* What has come of one sender. */
struct arrivals {
	uint64_t received, bytes, disordered, duplicates;
	uint64_t first_ns, last_ns;
	int64_t highest, sent; /* sent: what its end said; 0 before */
	int64_t transit_ns;
	double jitter_ns;
	struct values times;
	int is_timed;
	unsigned char seen[MOST_NUMBERS / 8];
};

static void forget(struct arrivals *a)
{
	uint32_t *kept = a->times.ns;
	int is_timed = a->is_timed;

	/* Pages of `seen` that were never touched stay so. */
	memset(a->seen, 0, (size_t)(a->highest / 8 + 1));
	memset(a, 0, offsetof(struct arrivals, seen));
	a->times.ns = kept;
	a->is_timed = is_timed;
}

static void arrived(struct arrivals *a, int64_t number, uint64_t sent_ns, size_t bytes, uint64_t now)
{
	int64_t transit = (int64_t)(now - sent_ns);

	if (number <= 0 || number >= MOST_NUMBERS)
		return;
	if (a->seen[number / 8] >> number % 8 & 1) {
		a->duplicates++;
		return;
	}
	a->seen[number / 8] |= (unsigned char)(1 << number % 8);
	if (a->received)
		a->jitter_ns += (fabs((double)(transit - a->transit_ns)) - a->jitter_ns) / 16;
	else
		a->first_ns = now;
	a->transit_ns = transit;
	a->last_ns = now;
	a->received++;
	a->bytes += bytes;
	if (number > a->highest)
		a->highest = number;
	else
		a->disordered++;
	if (a->is_timed)
		values_add(&a->times, transit > 0 ? (uint64_t)transit : 0);
}

static void print_arrivals(const struct arrivals *a)
{
	printf("\"received\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"out_of_order\": %" PRIu64 ", \"duplicates\": %" PRIu64
	       ", \"seconds\": %.6f, \"jitter_us\": %.3f",
	       a->received, a->bytes, a->disordered, a->duplicates, (double)(a->last_ns - a->first_ns) / 1e9, a->jitter_ns / 1e3);
}

/* ---- schedule ---------------------------------------------------------------------------------------------------- */
struct schedule {
	double rate;
	uint64_t start_ns, end_ns, total, sent, late_ns;
};

static struct schedule schedule_of(double rate, double seconds)
{
	double total = rate > 0 ? round(rate * seconds) : MOST_NUMBERS - 1;
	struct schedule made = { .rate = rate, .start_ns = now_ns() };

	if (total > MOST_NUMBERS - 1)
		fail("%.0f numbers: at most %u", total, MOST_NUMBERS - 1);
	made.total = total < 1 ? 1 : (uint64_t)total;
	made.end_ns = made.start_ns + (uint64_t)(seconds * 1e9);
	return made;
}

/* How many may go now, at most BATCH. */
static unsigned due(const struct schedule *s, uint64_t now)
{
	uint64_t all = s->total;

	if (s->rate > 0) {
		double by_now = (double)(now - s->start_ns) * s->rate / 1e9 + 1;
		if (by_now < (double)all)
			all = (uint64_t)by_now;
	}
	if (all <= s->sent)
		return 0;
	return all - s->sent < BATCH ? (unsigned)(all - s->sent) : BATCH;
}

static uint64_t next_ns(const struct schedule *s)
{
	return s->start_ns + (s->rate > 0 ? (uint64_t)((double)s->sent * 1e9 / s->rate) : 0);
}

static void took(struct schedule *s, unsigned count, uint64_t now)
{
	uint64_t wanted = next_ns(s);

	if (s->rate > 0 && count && now > wanted && now - wanted > s->late_ns)
		s->late_ns = now - wanted;
	s->sent += count;
}

static int is_over(const struct schedule *s, uint64_t now)
{
	return s->sent >= s->total || now >= s->end_ns + (s->rate > 0 ? LATE_NS : 0);
}

static void sleep_until(uint64_t ns)
{
	struct timespec until = { .tv_sec = (time_t)(ns / SECOND_NS), .tv_nsec = (long)(ns % SECOND_NS) };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
		;
}

static void print_schedule(const struct schedule *s, uint64_t stopped)
{
	printf("{\"due\": %" PRIu64 ", \"sent\": %" PRIu64 ", \"sent_seconds\": %.6f, \"late_us\": %.3f, ",
	       s->rate > 0 ? s->total : s->sent, s->sent, (double)(stopped - s->start_ns) / 1e9, (double)s->late_ns / 1e3);
}

/* ---- sockets ----------------------------------------------------------------------------------------------------- */
static int made_socket(int type)
{
	int fd = socket(AF_INET, type, 0);

	if (fd < 0)
		fail("socket: %s", strerror(errno));
	return fd;
}

/* Beyond net.core.rmem_max, as root may (socket(7)); up to it for others. */
static void room(int fd, int bytes)
{
	if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof(bytes)))
		(void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
}

static int connected(int type, const char *host, int port)
{
	struct sockaddr_in peer = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	int fd = made_socket(type), one = 1, bytes = SOCKET_BYTES;

	if (inet_pton(AF_INET, host, &peer.sin_addr) != 1)
		fail("HOST: expected an IPv4 address, found %s", host);
	room(fd, SOCKET_BYTES);
	if (type == SOCK_DGRAM)
		(void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
	else
		(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	if (connect(fd, (struct sockaddr *)&peer, sizeof(peer)))
		fail("%s:%d: %s", host, port, strerror(errno));
	return fd;
}

/* Slots of one size for sendmmsg and recvmmsg. */
struct batch {
	size_t bytes;
	unsigned char *slots;
	struct iovec vectors[BATCH];
	struct mmsghdr messages[BATCH];
};

static struct batch *batch_of(size_t bytes)
{
	struct batch *made = zeroed(1, sizeof(*made));

	made->bytes = bytes;
	made->slots = zeroed(BATCH, bytes);
	for (int i = 0; i < BATCH; i++) {
		made->vectors[i] = (struct iovec){ made->slots + (size_t)i * bytes, bytes };
		made->messages[i].msg_hdr.msg_iov = &made->vectors[i];
		made->messages[i].msg_hdr.msg_iovlen = 1;
		if (bytes >= HEAD_BYTES + 4)
			put(made->slots + (size_t)i * bytes + HEAD_BYTES, NUMBER_64);
	}
	return made;
}

/* A full queue, or an ICMP error of an earlier datagram: nothing was moved. */
static int is_passing(int error)
{
	return error == EAGAIN || error == ENOBUFS || error == ECONNREFUSED || error == EINTR;
}

/* Sends the next `count` datagrams; how many the kernel took. */
static unsigned send_batch(int fd, struct batch *batch, uint64_t sent, unsigned count, uint64_t now)
{
	for (unsigned i = 0; i < count; i++)
		put_head(batch->slots + i * batch->bytes, (int64_t)(sent + i + 1), now);
	int done = sendmmsg(fd, batch->messages, count, 0);
	if (done < 0 && !is_passing(errno))
		fail("send: %s", strerror(errno));
	return done < 0 ? 0 : (unsigned)done;
}

/* ---- send -------------------------------------------------------------------------------------------------------- */
/* Tells the sink that this was all, until it reports. 0 when it never does. */
static int ask_report(int fd, struct batch *batch, uint64_t sent, unsigned char *answer)
{
	struct pollfd waits = { .fd = fd, .events = POLLIN };

	for (int try = 0; try < END_TRIES; try++) {
		put_head(batch->slots, -(int64_t)(sent + 1), now_ns());
		if (send(fd, batch->slots, batch->bytes, 0) < 0 && !is_passing(errno))
			fail("send: %s", strerror(errno));
		uint64_t until = now_ns() + END_WAIT_MS * 1000000ull, now;
		while ((now = now_ns()) < until && poll(&waits, 1, (int)((until - now) / 1000000) + 1) > 0) {
			ssize_t got = recv(fd, answer, MOST_BYTES, MSG_DONTWAIT);
			if (got >= HEAD_BYTES + REPORT_BYTES && word(answer + HEAD_BYTES) & VERSION_1)
				return 1;
		}
	}
	return 0;
}

static void send_udp(const char *host, int port, size_t bytes, double rate, double seconds)
{
	int fd = connected(SOCK_DGRAM, host, port);
	struct batch *batch = batch_of(bytes);
	unsigned char *answer = zeroed(1, MOST_BYTES);
	struct schedule s = schedule_of(rate, seconds);
	uint64_t now;

	while (!is_over(&s, now = now_ns())) {
		unsigned count = due(&s, now);
		if (count) {
			unsigned done = send_batch(fd, batch, s.sent, count, now);
			took(&s, done, now);
			if (!done)
				sleep_until(now + 100000);
		} else {
			sleep_until(next_ns(&s));
		}
	}
	now = now_ns();
	if (!ask_report(fd, batch, s.sent, answer))
		fail("%s:%d: no report of the sink after %d requests", host, port, END_TRIES);
	const unsigned char *at = answer + HEAD_BYTES;
	uint64_t all = word(at + 28), lost = word(at + 20), received = all > lost ? all - lost : 0;
	uint64_t came = (uint64_t)word(at + 4) << 32 | word(at + 8);
	if (all == s.sent + 1 && received) {
		/* iperf 2.1.8 counts the datagram of the end, which came. */
		received--;
		came -= came > bytes ? bytes : came;
	}
	print_schedule(&s, now);
	printf("\"received\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"out_of_order\": %u, \"seconds\": %.6f, \"jitter_us\": %.3f}\n",
	       received, came, word(at + 24), word(at + 12) + word(at + 16) / 1e6, word(at + 32) * 1e6 + word(at + 36));
}

static unsigned retransmitted(int fd)
{
	struct tcp_info info = { 0 };
	socklen_t bytes = sizeof(info);

	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes))
		fail("TCP_INFO: %s", strerror(errno));
	return info.tcpi_total_retrans;
}

static void send_tcp(const char *host, int port, size_t bytes, double rate, double seconds)
{
	int fd = connected(SOCK_STREAM, host, port);
	/* With neither flag of a client header set, it is none for iperf 2. */
	unsigned char *message = zeroed(1, bytes);
	struct timeval patience = { .tv_sec = (time_t)seconds + 30 };
	struct schedule s = schedule_of(rate, seconds);
	uint64_t now;
	ssize_t got;

	(void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	(void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	while (!is_over(&s, now = now_ns())) {
		if (!due(&s, now)) {
			sleep_until(next_ns(&s));
			continue;
		}
		put_head(message, (int64_t)s.sent + 1, now);
		for (size_t done = 0; done < bytes;) {
			got = send(fd, message + done, bytes - done, MSG_NOSIGNAL);
			if (got < 0 && errno != EINTR)
				fail("%s:%d: send: %s", host, port, strerror(errno));
			done += got > 0 ? (size_t)got : 0;
		}
		took(&s, 1, now);
	}
	now = now_ns();
	unsigned again = retransmitted(fd);
	/* All has been read when the peer closes. */
	if (shutdown(fd, SHUT_WR))
		fail("shutdown: %s", strerror(errno));
	unsigned char rest[4096];
	while ((got = recv(fd, rest, sizeof(rest), 0)) > 0)
		;
	if (got < 0)
		fail("%s:%d did not close: %s", host, port, strerror(errno));
	print_schedule(&s, now);
	printf("\"received\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"seconds\": %.6f, \"retransmitted\": %u}\n", s.sent,
	       s.sent * bytes, (double)(now_ns() - s.start_ns) / 1e9, again);
}

/* ---- trip -------------------------------------------------------------------------------------------------------- */
static struct arrivals back;

/* Waits for these events, until a moment. */
static int ready(int fd, short events, uint64_t until)
{
	struct pollfd waits = { .fd = fd, .events = events };
	uint64_t now = now_ns(), left = until > now ? until - now : 0;
	struct timespec most = { .tv_sec = (time_t)(left / SECOND_NS), .tv_nsec = (long)(left % SECOND_NS) };

	return ppoll(&waits, 1, &most, NULL) > 0;
}

static void print_trip(const struct schedule *s, uint64_t stopped)
{
	print_schedule(s, stopped);
	print_arrivals(&back);
	print_values("rtt_us", &back.times, 1);
}

static void trip_udp(const char *host, int port, size_t bytes, double rate, double seconds)
{
	int fd = connected(SOCK_DGRAM, host, port);
	struct batch *batch = batch_of(bytes), *reply = batch_of(bytes);
	uint64_t *sent_ns = zeroed(MOST_NUMBERS, sizeof(*sent_ns));
	struct schedule s = schedule_of(rate, seconds);
	uint64_t now, stopped = 0, until = 0;

	for (;;) {
		now = now_ns();
		if (!stopped && is_over(&s, now)) {
			stopped = now;
			until = now + GRACE_NS;
		}
		if (stopped && (back.received >= s.sent || now >= until))
			break;
		unsigned count = stopped ? 0 : due(&s, now);
		if (count) {
			unsigned done = send_batch(fd, batch, s.sent, count, now);
			for (unsigned i = 0; i < done; i++)
				sent_ns[s.sent + i + 1] = now;
			took(&s, done, now);
		}
		uint64_t wait = stopped ? until : count ? 0 : next_ns(&s);
		if (!ready(fd, POLLIN, wait))
			continue;
		int got = recvmmsg(fd, reply->messages, BATCH, MSG_DONTWAIT, NULL);
		if (got < 0 && !is_passing(errno))
			fail("receive: %s", strerror(errno));
		now = now_ns();
		for (int i = 0; i < got; i++) {
			int64_t number = number_of(reply->slots + (size_t)i * bytes);
			if (number > 0 && (uint64_t)number <= s.sent)
				arrived(&back, number, sent_ns[number], reply->messages[i].msg_len, now);
		}
	}
	print_trip(&s, stopped);
	puts("}");
}

static void trip_tcp(const char *host, int port, size_t bytes, double rate, double seconds)
{
	int fd = connected(SOCK_STREAM, host, port);
	unsigned char *message = zeroed(1, bytes), *reply = zeroed(1, bytes);
	uint64_t *due_ns = zeroed(MOST_NUMBERS, sizeof(*due_ns));
	struct schedule s = schedule_of(rate, seconds);
	size_t written = bytes, have = 0;
	uint64_t now, stopped = 0, until = 0;

	for (;;) {
		now = now_ns();
		if (!stopped && is_over(&s, now)) {
			stopped = now;
			until = now + GRACE_NS;
		}
		if (stopped && (back.received >= s.sent || now >= until))
			break;
		if (!stopped && written == bytes && due(&s, now)) {
			due_ns[s.sent + 1] = s.rate > 0 ? next_ns(&s) : now;
			put_head(message, (int64_t)s.sent + 1, now);
			took(&s, 1, now);
			written = 0;
		}
		if (written < bytes) {
			ssize_t done = send(fd, message + written, bytes - written, MSG_DONTWAIT | MSG_NOSIGNAL);
			if (done < 0 && !is_passing(errno))
				fail("%s:%d: send: %s", host, port, strerror(errno));
			written += done > 0 ? (size_t)done : 0;
		}
		int is_behind = written < bytes;
		uint64_t wait = stopped ? until : is_behind ? s.end_ns + LATE_NS : due(&s, now_ns()) ? 0 : next_ns(&s);
		if (!ready(fd, (short)(POLLIN | (is_behind ? POLLOUT : 0)), wait))
			continue;
		for (;;) {
			ssize_t got = recv(fd, reply + have, bytes - have, MSG_DONTWAIT);
			if (got == 0)
				fail("%s:%d: the echo server closed the connection", host, port);
			if (got < 0 && !is_passing(errno))
				fail("%s:%d: receive: %s", host, port, strerror(errno));
			if (got < 0)
				break;
			have += (size_t)got;
			if (have < bytes)
				continue;
			have = 0;
			int64_t number = number_of(reply);
			if (number != (int64_t)back.received + 1 || (uint64_t)number > s.sent)
				fail("%s:%d: expected message %" PRIu64 ", found %" PRId64, host, port, back.received + 1, number);
			arrived(&back, number, due_ns[number], bytes, now_ns());
		}
	}
	print_trip(&s, stopped);
	printf(", \"retransmitted\": %u}\n", retransmitted(fd));
}

/* ---- sink -------------------------------------------------------------------------------------------------------- */
static int bound(int type, int port, int buffer)
{
	struct sockaddr_in own = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	int fd = made_socket(type), one = 1;

	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (buffer)
		room(fd, buffer);
	if (bind(fd, (struct sockaddr *)&own, sizeof(own)))
		fail("port %d: %s", port, strerror(errno));
	return fd;
}

/* The datagram goes back with a report as iperf 2 has it. A lost answer is asked for again. */
static void report(int fd, unsigned char *datagram, size_t bytes, const struct arrivals *a, const struct sockaddr_in *to)
{
	uint64_t us = (a->last_ns - a->first_ns) / 1000, all = (uint64_t)a->sent, jitter = (uint64_t)(a->jitter_ns / 1e3);
	const uint32_t words[] = {
		VERSION_1, (uint32_t)(a->bytes >> 32), (uint32_t)a->bytes, (uint32_t)(us / 1000000), (uint32_t)(us % 1000000),
		(uint32_t)(all - a->received), (uint32_t)a->disordered, (uint32_t)all, (uint32_t)(jitter / 1000000),
		(uint32_t)(jitter % 1000000),
	};

	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
		put(datagram + HEAD_BYTES + 4 * i, words[i]);
	if (bytes < HEAD_BYTES + REPORT_BYTES)
		bytes = HEAD_BYTES + REPORT_BYTES;
	(void)sendto(fd, datagram, bytes, 0, (const struct sockaddr *)to, sizeof(*to));
}

/* One datagram for each system call. Counts those of the sender that was heard last. */
static void sink_udp(int fd, int is_timed)
{
	static struct arrivals a;
	static unsigned char datagram[MOST_BYTES + 1];
	struct sockaddr_in sender = { 0 };

	a.is_timed = is_timed;
	for (;;) {
		struct sockaddr_in from;
		socklen_t length = sizeof(from);
		ssize_t bytes = recvfrom(fd, datagram, sizeof(datagram), 0, (struct sockaddr *)&from, &length);
		if (bytes < HEAD_BYTES)
			continue;
		int64_t number = number_of(datagram);
		int is_other = from.sin_port != sender.sin_port || from.sin_addr.s_addr != sender.sin_addr.s_addr;
		if (is_other || (a.sent && number == 1)) {
			forget(&a);
			sender = from;
		}
		if (number >= 0) {
			arrived(&a, number, us_of(datagram) * 1000, (size_t)bytes, now_ns());
			continue;
		}
		int is_first = !a.sent;
		/* More than it says cannot have come; a count that lies is not believed. */
		a.sent = -(number + 1) > (int64_t)a.received ? -(number + 1) : (int64_t)a.received;
		report(fd, datagram, (size_t)bytes, &a, &from);
		if (!is_first)
			continue;
		printf("{\"sent\": %" PRId64 ", ", a.sent);
		print_arrivals(&a);
		if (is_timed)
			print_values("latency_us", &a.times, 0);
		puts("}");
		fflush(stdout);
	}
}

/* One connection after the other, read to its end and closed. */
static void sink_tcp(int fd)
{
	static unsigned char bytes[1 << 16];

	if (listen(fd, 16))
		fail("listen: %s", strerror(errno));
	for (;;) {
		int stream = accept(fd, NULL, NULL);
		if (stream < 0) {
			if (errno == ECONNABORTED || errno == EINTR)
				continue;
			fail("accept: %s", strerror(errno));
		}
		while (read(stream, bytes, sizeof(bytes)) > 0)
			;
		close(stream);
	}
}

/* ---- words ------------------------------------------------------------------------------------------------------- */
static double number_word(const char *name, const char *text, double low, double high)
{
	char *end;
	double value = strtod(text, &end);

	if (end == text || *end || !(value >= low && value <= high))
		fail("%s: expected %g to %g, found %s", name, low, high, text);
	return value;
}

static void usage(void)
{
	fputs("usage: paced send|trip udp|tcp HOST PORT BYTES RATE SECONDS\n"
	      "       paced sink udp|tcp PORT [BUFFER [latency]]\n", stderr);
	exit(2);
}

int main(int argc, char **argv)
{
	if (argc < 4 || (strcmp(argv[2], "udp") && strcmp(argv[2], "tcp")))
		usage();
	int is_udp = !strcmp(argv[2], "udp"), type = is_udp ? SOCK_DGRAM : SOCK_STREAM;
	/* Sleeps end when they should, not up to 50 µs later. */
	(void)prctl(PR_SET_TIMERSLACK, 1);
	int is_timed = argc == 6 && !strcmp(argv[5], "latency");
	if (!strcmp(argv[1], "sink") && (argc <= 5 || is_timed)) {
		int buffer = argc >= 5 ? (int)number_word("BUFFER", argv[4], 0, INT_MAX / 2) : 0;
		int fd = bound(type, (int)number_word("PORT", argv[3], 1, 65535), buffer);
		if (is_udp)
			sink_udp(fd, is_timed);
		sink_tcp(fd);
	}
	int is_send = !strcmp(argv[1], "send");
	back.is_timed = 1;
	if (argc != 8 || (!is_send && strcmp(argv[1], "trip")))
		usage();
	int port = (int)number_word("PORT", argv[4], 1, 65535);
	size_t bytes = (size_t)number_word("BYTES", argv[5], is_udp ? LEAST_DATAGRAM : HEAD_BYTES, MOST_BYTES);
	double rate = number_word("RATE", argv[6], 0, 1e8), seconds = number_word("SECONDS", argv[7], 0.001, 3600);
	if (is_udp)
		(is_send ? send_udp : trip_udp)(argv[3], port, bytes, rate, seconds);
	else
		(is_send ? send_tcp : trip_tcp)(argv[3], port, bytes, rate, seconds);
	return 0;
}
