/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Load through a router for the workload `bypass` of the lab: frames and sockets from end A to end B, measured while it runs.
 *
 * usage: pathload A B      then commands on standard input, one JSON object on standard output for each
 *        pathload spin     keeps both CPUs from going idle, for as long as its standard input is open: it runs only on idle CPU time
 *                          (SCHED_IDLE). In a virtual machine a halted CPU is the hypervisor's, and to be woken takes longer than all that is measured here.
 *
 * An end is tap:NAME:NAMESPACE or veth:NAMESPACE. NAME is a tap of the namespace that this runs in, or the path of a macvtap's device, held open for as long as this runs (a tap
 * that no process holds loses its carrier, and with it its queue). NAMESPACE is a path; its `eth0` is what the end's own kernel uses: the other end of
 * the veth, or another tap, between which and NAME frames are carried one by one as a monitor of microVMs does it: non-blocking, one per
 * system call, vnet header and all.
 *
 *   frames WARM SECONDS FILE FLOWS AWAKE  A sends the file's frame (vnet header first) as fast as it can, B counts. FLOWS > 1: the UDP source port counts up.
 *                                         AWAKE 1: B never sleeps, so A wakes no thread
 *                                         A TCP frame's connection is opened first, once, by both ends: `opened` says whether that went well
 *   trip WARM SECONDS FILE                one frame at a time, sent and awaited by one thread: nanoseconds from the write to the read
 *   tcp WARM SECONDS ADDRESS WRITE N CORES    N connections, a thread each at both ends
 *   rr WARM SECONDS ADDRESS               one byte there and back, both ends blocking
 *   udp WARM SECONDS ADDRESS BYTES        one socket that sends, one that receives
 *
 * A's threads run on CPU 0, B's on CPU 1 (CORES 1: all on CPU 0). What happens in the first WARM seconds, and until each flow was sent twice, is not counted. CPU times are the
 * kernel's own, per thread: forwarding is done within A's calls. `retransmitted` and `disordered` are segments of the connections, as both ends' TCP counted them.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define VNET 10
#define ETH 14
#define LONGEST 70000
#define MAX_WORKERS 16
#define MAX_SAMPLES (1 << 20)
#define PORT 7000
/* Where tcpi_rcv_ooopack is in the kernel's struct tcp_info (Linux 5.4). */
#define RCV_OOOPACK 224

enum role { SENDER, RECEIVER, CARRIER, ROLES };

struct worker {
	pthread_t thread;
	enum role role;
	int cpu, in, out;
	size_t bytes_a_call;
	uint64_t calls, refused, bytes;
} __attribute__((aligned(128)));

struct snapshot {
	double now, cpu[ROLES];
	uint64_t calls[ROLES], refused[ROLES], bytes[ROLES];
};

struct end {
	int tap, guest, space;	/* -1: not a tap */
};

static struct end ends[2];
/* The packet sockets of ends that are no taps, from the first command that sends frames to the next one that does not: to close one the kernel
 * waits for a grace period, which would be in the way of every command. */
static int raws[2] = { -1, -1 };
static int home;
static uint8_t frame[LONGEST];
static size_t length;
static unsigned flows;
static bool stays_awake;
static volatile bool over, counting;
static struct worker workers[MAX_WORKERS];
static unsigned working;
static uint32_t samples[MAX_SAMPLES];
static unsigned sampled;
static bool opened;
static unsigned retransmitted, disordered;

static void die(const char *what)
{
	fprintf(stderr, "pathload: %s: %s\n", what, strerror(errno));
	exit(1);
}

static double seconds_now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void pause_s(double seconds)
{
	struct timespec t = { seconds, (seconds - (long)seconds) * 1e9 };

	nanosleep(&t, NULL);
}

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static void enter(int space)
{
	if (setns(space, CLONE_NEWNET))
		die("setns");
}

/* A macvtap's own character device is its path; what names no file is a tap. */
static int open_tap(const char *name)
{
	struct ifreq request = { .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR };
	int fd = open(strchr(name, '/') ? name : "/dev/net/tun", O_RDWR | O_NONBLOCK);

	strncpy(request.ifr_name, name, IFNAMSIZ - 1);
	if (fd < 0 || ioctl(fd, TUNSETIFF, &request))
		die(name);
	if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6))
		die("TUNSETOFFLOAD");
	return fd;
}

static struct end open_end(char *text)
{
	struct end e = { -1, -1, -1 };
	bool tap = !strncmp(text, "tap:", 4);
	char *name = strchr(text, ':') + 1, *space = tap ? strchr(name, ':') : name;

	if (tap) {
		*space++ = 0;
		e.tap = open_tap(name);
	}
	e.space = open(space, O_RDONLY);
	if (e.space < 0)
		die(space);
	if (tap) {
		enter(e.space);
		e.guest = open_tap("eth0");
		enter(home);
	}
	return e;
}

/* Where frames are sent or received raw: the tap, or a packet socket at the veth's other end. */
static int raw(int n)
{
	const struct end *e = &ends[n];
	struct sockaddr_ll to = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_IP) };
	int room = 8 << 20, on = 1, fd;

	if (e->tap >= 0)
		return e->tap;
	if (raws[n] >= 0)
		return raws[n];
	enter(e->space);
	fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
	to.sll_ifindex = if_nametoindex("eth0");
	if (fd < 0 || !to.sll_ifindex)
		die("eth0");
	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof(on));
	setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof(on));
	if (bind(fd, (struct sockaddr *)&to, sizeof(to)))
		die("bind");
	enter(home);
	return raws[n] = fd;
}

/* No thread listens beside the sockets any more. */
static void close_raws(void)
{
	for (int n = 0; n < 2; n++) {
		if (raws[n] >= 0)
			close(raws[n]);
		raws[n] = -1;
	}
}

static void drain(int fd)
{
	static uint8_t waste[LONGEST];

	while (read(fd, waste, sizeof(waste)) > 0)
		;
}

static int connection(const struct end *e, int kind)
{
	int fd, on = 1;

	enter(e->space);
	fd = socket(AF_INET, kind, 0);
	enter(home);
	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (kind == SOCK_STREAM)
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return fd;
}

/* The internet checksum over `bytes`, which are even, on top of `sum`. */
static uint16_t checksum(const uint8_t *data, size_t bytes, uint32_t sum)
{
	for (size_t n = 0; n < bytes; n += 2)
		sum += data[n] << 8 | data[n + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* A TCP frame without data: the headers of `like`, the other way round where it is an answer. */
static size_t control(uint8_t *to, const uint8_t *like, bool answer, uint8_t flags, uint32_t seq, uint32_t ack)
{
	uint8_t *mac = to + VNET, *ip = mac + ETH, *tcp = ip + 20;

	memset(to, 0, VNET);
	memcpy(mac, like + VNET, ETH + 40);
	if (answer) {
		memcpy(mac, like + VNET + 6, 6), memcpy(mac + 6, like + VNET, 6);
		memcpy(ip + 12, like + VNET + ETH + 16, 4), memcpy(ip + 16, like + VNET + ETH + 12, 4);
		memcpy(tcp, like + VNET + ETH + 22, 2), memcpy(tcp + 2, like + VNET + ETH + 20, 2);
		ip[8] = 64;
	}
	ip[2] = 0, ip[3] = 40, ip[10] = ip[11] = 0;
	for (int n = 0; n < 4; n++)
		tcp[4 + n] = seq >> (24 - 8 * n), tcp[8 + n] = ack >> (24 - 8 * n);
	tcp[12] = 5 << 4, tcp[13] = flags, tcp[14] = tcp[15] = 0xff, tcp[16] = tcp[17] = 0;
	uint16_t sum = checksum(ip, 20, 0);
	ip[10] = sum >> 8, ip[11] = sum;
	sum = checksum(tcp, 20, (uint16_t)~checksum(ip + 12, 8, 6 + 20));
	tcp[16] = sum >> 8, tcp[17] = sum;
	return VNET + ETH + 40;
}

/* Another source port, and the checksum that goes with it. */
static void next_flow(unsigned n)
{
	uint8_t *udp = frame + VNET + ETH + 20;
	uint16_t old = udp[0] << 8 | udp[1], port = 1024 + n % flows;
	uint32_t sum = (uint16_t)~(udp[6] << 8 | udp[7]) + (uint16_t)~old + port;

	sum = (sum & 0xffff) + (sum >> 16);
	sum = (uint16_t)~((sum & 0xffff) + (sum >> 16));
	udp[0] = port >> 8, udp[1] = port;
	udp[6] = sum >> 8, udp[7] = sum;
}

/* Not libc's read and write: in a program with threads those are cancellation points, which costs as much as a lookup. */
static ssize_t sys_write(int fd, const void *data, size_t bytes)
{
	return syscall(SYS_write, fd, data, bytes);
}

static ssize_t sys_read(int fd, void *data, size_t bytes)
{
	return syscall(SYS_read, fd, data, bytes);
}

static bool is_ip(const uint8_t *data, ssize_t got)
{
	return got > VNET + ETH && data[VNET + 12] == 8 && data[VNET + 13] == 0;
}

/* Waits for a TCP frame with these flags. */
static bool await_flags(int fd, uint8_t *buffer, uint8_t flags)
{
	for (int tries = 0; tries < 100; tries++) {
		struct pollfd p = { .fd = fd, .events = POLLIN };
		ssize_t got;

		poll(&p, 1, 10);
		while ((got = sys_read(fd, buffer, LONGEST)) > 0)
			if (is_ip(buffer, got) && got >= VNET + ETH + 40 && buffer[VNET + ETH + 9] == 6 &&
			    (buffer[VNET + ETH + 33] & 0x3f) == flags)
				return true;
	}
	return false;
}

/* Opens the connection of the TCP frame, as its two ends would: connection tracking holds it for established then. */
static bool open_connection(int a, int b)
{
	enum { SYN = 0x02, ACK = 0x10 };
	static uint8_t buffer[LONGEST], seen[LONGEST];
	const uint8_t *tcp = frame + VNET + ETH + 20;
	uint32_t seq = (uint32_t)tcp[4] << 24 | tcp[5] << 16 | tcp[6] << 8 | tcp[7], other = 1 << 20;

	if (sys_write(a, buffer, control(buffer, frame, false, SYN, seq - 1, 0)) < 0 || !await_flags(b, seen, SYN))
		return false;
	if (sys_write(b, buffer, control(buffer, seen, true, SYN | ACK, other, seq)) < 0 || !await_flags(a, buffer, SYN | ACK))
		return false;
	if (sys_write(a, buffer, control(buffer, frame, false, ACK, seq, other + 1)) < 0 || !await_flags(b, buffer, ACK))
		return false;
	return sys_write(b, buffer, control(buffer, seen, true, ACK, other + 1, seq)) > 0 && await_flags(a, buffer, ACK);
}

static void *sends_frames(void *argument)
{
	struct worker *w = argument;
	unsigned n = 0;

	pin(w->cpu);
	while (!over) {
		if (flows > 1)
			next_flow(n++);
		if (sys_write(w->out, frame, length) == (ssize_t)length)
			w->calls++;
		else if (errno == EAGAIN || errno == ENOBUFS)
			w->refused++;
		else
			die("write");
	}
	return NULL;
}

static void *receives_frames(void *argument)
{
	struct worker *w = argument;
	static uint8_t buffer[LONGEST];

	pin(w->cpu);
	while (!over) {
		ssize_t got = sys_read(w->in, buffer, sizeof(buffer));

		if (is_ip(buffer, got)) {
			w->calls++;
			w->bytes += got - VNET;
		} else if (got < 0 && !stays_awake) {
			struct pollfd p = { .fd = w->in, .events = POLLIN };

			poll(&p, 1, 10);
		}
	}
	return NULL;
}

static void *trips(void *argument)
{
	struct worker *w = argument;
	static uint8_t buffer[LONGEST];

	pin(w->cpu);
	while (!over) {
		uint64_t start = now_ns(), end;
		ssize_t got;

		if (sys_write(w->out, frame, length) != (ssize_t)length)
			die("write");
		/* Both are this thread's: what is not there within a millisecond was lost. */
		do {
			got = sys_read(w->in, buffer, sizeof(buffer));
			end = now_ns();
		} while (!is_ip(buffer, got) && end - start < 1000000);
		if (!is_ip(buffer, got)) {
			w->refused++;
			continue;
		}
		w->calls++;
		if (counting && sampled < MAX_SAMPLES)
			samples[sampled++] = end - start;
	}
	return NULL;
}

/* Between a tap of the router and its guest's, both ways. */
static void *carries(void *argument)
{
	struct worker *w = argument;
	uint8_t *buffer = malloc(LONGEST);
	struct pollfd p[2] = { { .fd = w->in, .events = POLLIN }, { .fd = w->out, .events = POLLIN } };

	pin(w->cpu);
	while (!over) {
		bool idle = true;

		for (int side = 0; side < 2; side++) {
			for (int n = 0; n < 64; n++) {
				ssize_t got = sys_read(p[side].fd, buffer, LONGEST);

				if (got < 0)
					break;
				idle = false;
				w->calls++;
				if (sys_write(p[!side].fd, buffer, got) != got)
					w->refused++;
			}
		}
		if (idle)
			poll(p, 2, 10);
	}
	free(buffer);
	return NULL;
}

static void *sends_stream(void *argument)
{
	struct worker *w = argument;
	uint8_t *data = calloc(1, w->bytes_a_call);

	pin(w->cpu);
	while (!over) {
		ssize_t put = send(w->out, data, w->bytes_a_call, MSG_NOSIGNAL);

		if (put > 0)
			w->calls++, w->bytes += put;
		else if (put < 0 && errno == ECONNREFUSED)
			w->refused++;
		else
			break;
	}
	free(data);
	return NULL;
}

static void *receives_stream(void *argument)
{
	struct worker *w = argument;
	uint8_t *data = malloc(1 << 18);

	pin(w->cpu);
	while (!over) {
		ssize_t got = recv(w->in, data, 1 << 18, 0);

		if (got > 0)
			w->calls++, w->bytes += got;
		else if (got == 0 || (errno != EAGAIN && errno != EINTR))
			break;
	}
	free(data);
	return NULL;
}

static void *echoes(void *argument)
{
	struct worker *w = argument;
	char byte;

	pin(w->cpu);
	while (recv(w->in, &byte, 1, 0) == 1 && send(w->in, &byte, 1, MSG_NOSIGNAL) == 1)
		w->calls++;
	return NULL;
}

static void *asks(void *argument)
{
	struct worker *w = argument;
	char byte = 'x';

	pin(w->cpu);
	while (!over) {
		uint64_t start = now_ns();

		if (send(w->out, &byte, 1, MSG_NOSIGNAL) != 1 || recv(w->out, &byte, 1, 0) != 1)
			break;
		w->calls++;
		if (counting && sampled < MAX_SAMPLES)
			samples[sampled++] = now_ns() - start;
	}
	return NULL;
}

static void start(void *(*work)(void *), enum role role, int cpu, int in, int out, size_t bytes_a_call)
{
	struct worker *w = &workers[working];

	if (working++ == MAX_WORKERS) {
		fprintf(stderr, "pathload: more than %d threads\n", MAX_WORKERS);
		exit(1);
	}
	*w = (struct worker){ .role = role, .cpu = cpu, .in = in, .out = out, .bytes_a_call = bytes_a_call };
	if (pthread_create(&w->thread, NULL, work, w))
		die("pthread_create");
}

static void start_carriers(int cpus[2])
{
	for (int n = 0; n < 2; n++)
		if (ends[n].tap >= 0) {
			/* What came while no thread carried frames is old. */
			drain(ends[n].tap);
			drain(ends[n].guest);
			start(carries, CARRIER, cpus[n], ends[n].guest, ends[n].tap, 0);
		}
}

static struct snapshot take_snapshot(void)
{
	struct snapshot s = { .now = seconds_now(CLOCK_MONOTONIC) };

	for (unsigned n = 0; n < working; n++) {
		struct worker *w = &workers[n];
		clockid_t clock;

		if (!pthread_getcpuclockid(w->thread, &clock))
			s.cpu[w->role] += seconds_now(clock);
		s.calls[w->role] += *(volatile uint64_t *)&w->calls;
		s.refused[w->role] += *(volatile uint64_t *)&w->refused;
		s.bytes[w->role] += *(volatile uint64_t *)&w->bytes;
	}
	return s;
}

static int ascending(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

/* What TCP had to send again, and what came out of order. Of a datagram socket, nothing. */
static void count_troubles(int fd)
{
	/* Longer than the C library's, whose headers are older than its last fields. */
	union {
		struct tcp_info known;
		uint8_t bytes[232];
	} info = {};
	socklen_t bytes = sizeof(info);
	uint32_t late;

	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) || bytes < RCV_OOOPACK + sizeof(late))
		return;
	memcpy(&late, info.bytes + RCV_OOOPACK, sizeof(late));
	retransmitted += info.known.tcpi_total_retrans;
	disordered += late;
}

/* Lets the workers run, ends them, and prints what they did. `fds` are shut down first, so that no thread sleeps on. Counting begins after `warm` seconds,
 * and not before `calls` were sent, but after two seconds at most: the frames of each flow until it is known. */
static void measure(double warm, double seconds, const int *fds, unsigned count, uint64_t calls)
{
	struct snapshot a, b;

	sampled = 0;
	pause_s(warm);
	for (int n = 0; n < 200 && take_snapshot().calls[SENDER] < calls; n++)
		pause_s(0.01);
	counting = true;
	a = take_snapshot();
	pause_s(seconds);
	b = take_snapshot();
	counting = false;
	over = true;
	for (unsigned n = 0; n < count; n++)
		count_troubles(fds[n]);
	for (unsigned n = 0; n < count; n++)
		shutdown(fds[n], SHUT_RDWR);
	for (unsigned n = 0; n < working; n++)
		pthread_join(workers[n].thread, NULL);
	printf("{\"seconds\":%.5f", b.now - a.now);
	for (int role = 0; role < ROLES; role++) {
		static const char *const names[] = { "sent", "got", "carried" };

		printf(",\"%s\":%lu,\"%s_refused\":%lu,\"%s_bytes\":%lu,\"%s_cpu_s\":%.6f", names[role], b.calls[role] - a.calls[role],
		       names[role], b.refused[role] - a.refused[role], names[role], b.bytes[role] - a.bytes[role], names[role],
		       b.cpu[role] - a.cpu[role]);
	}
	if (sampled) {
		qsort(samples, sampled, sizeof(*samples), ascending);
		printf(",\"samples\":%u,\"p50_ns\":%u,\"p99_ns\":%u", sampled, samples[sampled / 2], samples[(uint64_t)sampled * 99 / 100]);
	}
	printf(",\"opened\":%s,\"retransmitted\":%u,\"disordered\":%u}\n", opened ? "true" : "false", retransmitted, disordered);
	fflush(stdout);
	working = 0;
	over = false;
	retransmitted = disordered = 0;
}

static void load_frame(const char *path)
{
	int file = open(path, O_RDONLY);
	ssize_t got = file < 0 ? -1 : read(file, frame, sizeof(frame));

	if (got < VNET + ETH + 28)
		die(path);
	length = got;
	close(file);
}

static void run_frames(double warm, double seconds, const char *path, unsigned count, bool one_by_one)
{
	int in = raw(0), out = raw(1);

	load_frame(path);
	flows = count;
	drain(out);
	drain(in);
	if (frame[VNET + ETH + 9] == IPPROTO_TCP && !opened)
		opened = open_connection(in, out);
	if (one_by_one) {
		start(trips, SENDER, 0, out, in, 0);
	} else {
		start(receives_frames, RECEIVER, 1, out, -1, 0);
		start(sends_frames, SENDER, 0, -1, in, 0);
	}
	measure(warm, seconds, NULL, 0, flows > 1 ? 2 * flows : 0);
}

static void run_sockets(const char *what, double warm, double seconds, const char *address, size_t bytes, unsigned count, int cores)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	int kind = strcmp(what, "udp") ? SOCK_STREAM : SOCK_DGRAM, cpus[2] = { 0, cores - 1 };
	struct timeval patience = { .tv_usec = 100000 };
	int fds[MAX_WORKERS], opened = 0, listener = connection(&ends[1], kind);
	bool rr = !strcmp(what, "rr");

	close_raws();
	inet_pton(AF_INET, address, &to.sin_addr);
	if (bind(listener, (struct sockaddr *)&to, sizeof(to)) || (kind == SOCK_STREAM && listen(listener, 16)))
		die(address);
	start_carriers(cpus);
	for (unsigned n = 0; n < count; n++) {
		struct timeval longest = { .tv_sec = 5 }, forever = {};
		int client = connection(&ends[0], kind), server = listener;

		setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &longest, sizeof(longest));
		if (connect(client, (struct sockaddr *)&to, sizeof(to)))
			die("connect");
		setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &forever, sizeof(forever));
		if (kind == SOCK_STREAM) {
			int on = 1;

			server = accept(listener, NULL, NULL);
			if (server < 0)
				die("accept");
			setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
			fds[opened++] = server;
		} else {
			setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
		}
		fds[opened++] = client;
		start(rr ? echoes : receives_stream, RECEIVER, cpus[1], server, -1, 0);
		start(rr ? asks : sends_stream, SENDER, cpus[0], -1, client, bytes);
	}
	measure(warm, seconds, fds, opened, 0);
	for (int n = 0; n < opened; n++)
		close(fds[n]);
	close(listener);
}

static void *spins(void *argument)
{
	struct sched_param none = {};

	pin(*(int *)argument);
	if (pthread_setschedparam(pthread_self(), SCHED_IDLE, &none))
		die("SCHED_IDLE");
	while (!over)
		;
	return NULL;
}

static int spin(void)
{
	static int cpus[2] = { 0, 1 };
	pthread_t threads[2];
	char end;

	for (int n = 0; n < 2; n++)
		if (pthread_create(&threads[n], NULL, spins, &cpus[n]))
			die("pthread_create");
	while (read(0, &end, 1) > 0)
		;
	over = true;
	for (int n = 0; n < 2; n++)
		pthread_join(threads[n], NULL);
	return 0;
}

int main(int argc, char **argv)
{
	char line[512];

	if (argc == 2 && !strcmp(argv[1], "spin"))
		return spin();
	if (argc != 3) {
		fprintf(stderr, "usage: pathload A B | pathload spin\n");
		return 2;
	}
	home = open("/proc/self/ns/net", O_RDONLY);
	for (int n = 0; n < 2; n++)
		ends[n] = open_end(argv[1 + n]);
	while (fgets(line, sizeof(line), stdin)) {
		char what[16], where[256];
		double warm, seconds;
		unsigned a = 1, b = 1, c = 2;
		int words = sscanf(line, "%15s %lf %lf %255s %u %u %u", what, &warm, &seconds, where, &a, &b, &c);

		if (words < 4) {
			fprintf(stderr, "pathload: not a command: %s", line);
			return 2;
		}
		if (!strcmp(what, "frames"))
			stays_awake = words == 6 && b, run_frames(warm, seconds, where, a, false);
		else if (!strcmp(what, "trip"))
			run_frames(warm, seconds, where, 1, true);
		else
			run_sockets(what, warm, seconds, where, a, b, c);
	}
	return 0;
}
