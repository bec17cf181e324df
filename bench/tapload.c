/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Load over two ends for bench/bypass.py: a writer on one CPU, a reader on another, one frame per system call.
 *
 * usage: tapload WRITE READ SECONDS FRAME-FILE FLOWS WRITER-CPU READER-CPU
 *
 * An end is tap:NAME (opened with a vnet header; the device must be there) or packet:NAME (an interface's packet socket). The frame is the file's
 * content, its vnet header (10 bytes) first; FLOWS above 1 makes the UDP source port count up, the checksum corrected.
 * The interfaces are those of the namespace that it runs in; packet:NAME@PATH enters the namespace at PATH for that end.
 *
 * Prints one JSON object: frames written, refused and read, and each thread's CPU time.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define VNET 10
#define ETH 14
#define LONGEST 70000

static uint8_t frame[LONGEST];
static size_t length;
static unsigned flows;
static volatile bool over;

struct side {
	int fd, cpu;
	bool tap;
	uint64_t frames, refused, bytes;
	double cpu_s;
};

static void die(const char *what)
{
	fprintf(stderr, "tapload: %s: %s\n", what, strerror(errno));
	exit(1);
}

static struct side open_side(char *text, int cpu)
{
	struct side s = { .cpu = cpu, .tap = !strncmp(text, "tap:", 4) };
	char *name = strchr(text, ':') + 1, *space = strchr(name, '@');
	int before = -1;

	if (space) {
		*space++ = 0;
		before = open("/proc/self/ns/net", O_RDONLY);
		int there = open(space, O_RDONLY);
		if (there < 0 || setns(there, CLONE_NEWNET))
			die(space);
	}
	if (s.tap) {
		struct ifreq request = { .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR };

		s.fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
		strncpy(request.ifr_name, name, IFNAMSIZ - 1);
		if (s.fd < 0 || ioctl(s.fd, TUNSETIFF, &request))
			die(name);
		if (ioctl(s.fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6))
			die("TUNSETOFFLOAD");
	} else {
		struct sockaddr_ll to = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
		int room = 8 << 20, on = 1;

		s.fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
		to.sll_ifindex = if_nametoindex(name);
		if (s.fd < 0 || !to.sll_ifindex)
			die(name);
		setsockopt(s.fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
		setsockopt(s.fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof(on));
		setsockopt(s.fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof(on));
		if (bind(s.fd, (struct sockaddr *)&to, sizeof(to)))
			die("bind");
	}
	if (before >= 0 && setns(before, CLONE_NEWNET))
		die("setns");
	return s;
}

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static double own_cpu(void)
{
	struct rusage u;

	getrusage(RUSAGE_THREAD, &u);
	return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
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

static void *writes(void *argument)
{
	struct side *s = argument;
	unsigned n = 0;

	pin(s->cpu);
	double before = own_cpu();
	while (!over) {
		if (flows > 1)
			next_flow(n++);
		if (write(s->fd, frame, length) == (ssize_t)length)
			s->frames++;
		else if (errno == EAGAIN || errno == ENOBUFS)
			s->refused++;
		else
			die("write");
	}
	s->cpu_s = own_cpu() - before;
	return NULL;
}

static void *reads(void *argument)
{
	struct side *s = argument;
	static uint8_t buffer[LONGEST];

	pin(s->cpu);
	double before = own_cpu();
	while (!over) {
		ssize_t got = read(s->fd, buffer, sizeof(buffer));

		if (got > VNET + ETH && buffer[VNET + 12] == 8 && buffer[VNET + 13] == 0) {
			s->frames++;
			s->bytes += got - VNET;
		} else if (got < 0) {
			struct pollfd p = { .fd = s->fd, .events = POLLIN };

			poll(&p, 1, 10);
		}
	}
	s->cpu_s = own_cpu() - before;
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t writer, reader;

	if (argc != 8) {
		fprintf(stderr, "usage: tapload WRITE READ SECONDS FRAME-FILE FLOWS WRITER-CPU READER-CPU\n");
		return 2;
	}
	struct side in = open_side(argv[1], atoi(argv[6])), out = open_side(argv[2], atoi(argv[7]));
	int file = open(argv[4], O_RDONLY);

	length = file < 0 ? 0 : read(file, frame, sizeof(frame));
	flows = atoi(argv[5]);
	if (length < VNET + ETH + 28)
		die(argv[4]);
	double seconds = atof(argv[3]);
	struct timespec wait = { seconds, (seconds - (long)seconds) * 1e9 }, start, end;

	clock_gettime(CLOCK_MONOTONIC, &start);
	pthread_create(&reader, NULL, reads, &out);
	pthread_create(&writer, NULL, writes, &in);
	nanosleep(&wait, NULL);
	over = true;
	pthread_join(writer, NULL);
	pthread_join(reader, NULL);
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("{\"written\":%lu,\"refused\":%lu,\"read\":%lu,\"bytes\":%lu,\"seconds\":%.4f,\"writer_cpu_s\":%.4f,\"reader_cpu_s\":%.4f}\n",
	       in.frames, in.refused, out.frames, out.bytes, end.tv_sec - start.tv_sec + (end.tv_nsec - start.tv_nsec) / 1e9, in.cpu_s, out.cpu_s);
	return 0;
}
