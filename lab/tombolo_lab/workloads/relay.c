/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The least that a tunnel between taps does which runs as a process and sends over UDP sockets: the system calls and
 * the copies, and nothing else. `./x lab-tools` builds it.
 *
 *   relay TAP LOCAL REMOTE PORT      until it is killed
 *
 * Makes the tap, with checksums and TCP segmentation left to its reader, and prints "ready". What it reads there goes
 * to REMOTE as messages that the kernel cuts (UDP_SEGMENT); what comes from there, joined by the kernel (UDP_GRO), is
 * written to the tap. A frame goes through in the form that it has: nothing is cut into packets, summed, looked up,
 * learned or counted, and the other end has to be this program too. So it is no tunnel, and no VXLAN. With TCP in large
 * frames it shows about how much any tunnel of this kind can carry. With small frames it does not: each is a datagram
 * of its own, where a better program gathers them.
 *
 * A frame is a mark of 8 bytes, its length, the tap's header and its bytes. It begins with a datagram, so a receiver
 * that lost one goes on with the next mark. Datagrams have as many bytes as those of a VXLAN tunnel with an MTU of
 * 1450 within: 8 + 14 + 1450.
 *
 * Limits: IPv4; frames of up to 65,600 bytes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define SEGMENT_BYTES (8 + 14 + 1450)
/* The most whole datagrams that fit a message. */
#define MESSAGE_BYTES (65507 / SEGMENT_BYTES * SEGMENT_BYTES)
#define TAP_BYTES 65600
#define SOCKET_BYTES (4 << 20)
/* Frames that are read before they are sent, and messages that one call receives. */
#define BATCH 4
/* Frames of one direction before the other one is looked at. */
#define TURN 64

struct head {
    uint64_t mark;
    uint32_t bytes; /* of the tap's header and the frame */
} __attribute__((packed));

static const uint64_t MARK = 0x6d756e696e696d21;

static void fail(const char *what) {
    fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
    exit(2);
}

static int open_tap(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0)
        fail("/dev/net/tun");
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(tap, TUNSETIFF, &request) < 0)
        fail("making the tap");
    if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0)
        fail("TUNSETOFFLOAD");
    return tap;
}

static struct sockaddr_in address_of(const char *text, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (inet_pton(AF_INET, text, &address.sin_addr) != 1) {
        fprintf(stderr, "relay: expected an IPv4 address, found %s\n", text);
        exit(2);
    }
    return address;
}

static int open_socket(const char *local, int port) {
    struct sockaddr_in address = address_of(local, port);
    int found = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), bytes = SOCKET_BYTES;
    if (found < 0 || bind(found, (struct sockaddr *)&address, sizeof address) < 0)
        fail("binding a socket");
    if (setsockopt(found, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes) < 0 ||
        setsockopt(found, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes) < 0)
        fail("SO_RCVBUFFORCE");
    return found;
}

/* From the tap to the other end. Returns whether more may wait. */
static int send_some(int tap, int out) {
    static struct {
        struct head head;
        char bytes[TAP_BYTES];
    } __attribute__((packed)) frames[BATCH];
    struct mmsghdr messages[2 * BATCH];
    struct iovec pieces[2 * BATCH];
    for (int turn = 0; turn < TURN / BATCH; turn++) {
        int count = 0, is_empty = 0;
        for (int i = 0; i < BATCH; i++) {
            ssize_t got = read(tap, frames[i].bytes, TAP_BYTES);
            if (got < 0) {
                if (errno != EAGAIN && errno != EIO && errno != EBADFD)
                    fail("reading from the tap");
                is_empty = 1;
                break;
            }
            frames[i].head = (struct head){MARK, got};
            size_t left = sizeof(struct head) + got;
            for (char *at = (char *)&frames[i]; left > 0; count++) {
                size_t part = left < MESSAGE_BYTES ? left : MESSAGE_BYTES;
                pieces[count] = (struct iovec){at, part};
                messages[count] = (struct mmsghdr){.msg_hdr = {.msg_iov = &pieces[count], .msg_iovlen = 1}};
                at += part;
                left -= part;
            }
        }
        for (int done = 0; done < count;) {
            int sent = sendmmsg(out, messages + done, count - done, 0);
            if (sent < 0 && errno == EAGAIN)
                break; /* The socket's buffer is full: lost, as in a switch. */
            if (sent < 0 && errno != ECONNREFUSED)
                fail("sending");
            done += sent > 0 ? sent : 1;
        }
        if (is_empty)
            return 0;
    }
    return 1;
}

/* A frame that has not come as a whole yet. */
static char partial[sizeof(struct head) + TAP_BYTES];
static size_t partial_bytes;

static size_t frame_bytes(const char *at) {
    struct head head;
    memcpy(&head, at, sizeof head);
    return head.bytes <= TAP_BYTES ? sizeof head + head.bytes : 0;
}

static int begins(const char *at, size_t bytes) {
    return bytes >= sizeof(struct head) && !memcmp(at, &MARK, sizeof MARK) && frame_bytes(at);
}

static void write_frame(int tap, const char *at) {
    ssize_t sent = write(tap, at + sizeof(struct head), frame_bytes(at) - sizeof(struct head));
    /* A tap that is down, or whose reader is behind, loses it. */
    if (sent < 0 && errno != EAGAIN && errno != EIO && errno != EINVAL && errno != ENOBUFS && errno != EBADFD)
        fail("writing to the tap");
}

static void take(int tap, const char *at, size_t bytes, size_t segment) {
    while (bytes > 0) {
        size_t part = bytes < segment ? bytes : segment;
        if (begins(at, part)) {
            partial_bytes = 0;
            size_t whole = frame_bytes(at);
            /* Up to the end of its last datagram; another mark within means that some were lost. */
            if (whole <= bytes) {
                size_t lost = 0;
                for (size_t next = segment; next < whole && !lost; next += segment)
                    lost = begins(at + next, bytes - next) ? next : 0;
                if (!lost)
                    write_frame(tap, at);
                part = lost ? lost : whole;
                at += part;
                bytes -= part;
                continue;
            }
        } else if (!partial_bytes) {
            at += part;
            bytes -= part;
            continue;
        }
        if (partial_bytes + part <= sizeof partial) {
            memcpy(partial + partial_bytes, at, part);
            partial_bytes += part;
            if (partial_bytes >= frame_bytes(partial)) {
                write_frame(tap, partial);
                partial_bytes = 0;
            }
        } else {
            partial_bytes = 0;
        }
        at += part;
        bytes -= part;
    }
}

/* From the other end to the tap. Returns whether more may wait. */
static int receive_some(int tap, int in) {
    static char buffers[BATCH][65536];
    char controls[BATCH][CMSG_SPACE(sizeof(int))];
    struct mmsghdr messages[BATCH];
    struct iovec pieces[BATCH];
    for (int i = 0; i < BATCH; i++) {
        pieces[i] = (struct iovec){buffers[i], sizeof buffers[i]};
        messages[i] = (struct mmsghdr){.msg_hdr = {.msg_iov = &pieces[i],
                                                   .msg_iovlen = 1,
                                                   .msg_control = controls[i],
                                                   .msg_controllen = sizeof controls[i]}};
    }
    int got = recvmmsg(in, messages, BATCH, 0, NULL);
    if (got < 0 && errno != EAGAIN)
        fail("receiving");
    for (int i = 0; i < got; i++) {
        int segment = messages[i].msg_len;
        struct cmsghdr *control = CMSG_FIRSTHDR(&messages[i].msg_hdr);
        if (control && control->cmsg_level == SOL_UDP && control->cmsg_type == UDP_GRO)
            memcpy(&segment, CMSG_DATA(control), sizeof segment);
        if (segment > 0)
            take(tap, buffers[i], messages[i].msg_len, segment);
    }
    return got == BATCH;
}

int main(int count, char **words) {
    if (count != 5 || atoi(words[4]) < 1 || atoi(words[4]) > 65535) {
        fprintf(stderr, "relay: expected TAP LOCAL REMOTE PORT\n");
        return 2;
    }
    int port = atoi(words[4]), segment = SEGMENT_BYTES, yes = 1;
    int tap = open_tap(words[1]), in = open_socket(words[2], port), out = open_socket(words[2], 0);
    struct sockaddr_in remote = address_of(words[3], port);
    if (connect(out, (struct sockaddr *)&remote, sizeof remote) < 0)
        fail("connecting");
    if (setsockopt(out, SOL_UDP, UDP_SEGMENT, &segment, sizeof segment) < 0)
        fail("UDP_SEGMENT");
    if (setsockopt(in, SOL_UDP, UDP_GRO, &yes, sizeof yes) < 0)
        fail("UDP_GRO");
    puts("ready");
    fflush(stdout);
    for (;;) {
        int more = send_some(tap, out);
        more |= receive_some(tap, in);
        struct pollfd ends[] = {{.fd = tap, .events = POLLIN}, {.fd = in, .events = POLLIN}};
        if (!more && poll(ends, 2, -1) < 0 && errno != EINTR)
            fail("poll");
    }
}
