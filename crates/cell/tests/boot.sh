#!/usr/bin/env bash
# Boots the cells under QEMU (emulation) on every machine type and checks what they promise: the first byte, checksums,
# statuses, many connections in little memory, exit codes, page rights, an idle processor. One line for each check; exit
# code 0 if all passed, 1 if one failed, 2 if a tool is missing. User networking only: no privilege, nothing left behind.
#
#   crates/cell/tests/boot.sh [IMAGE_FOLDER]      (default: cells/target/x86_64-unknown-linux-gnu/release)
set -u

root=$(cd "$(dirname "$0")/../../.." && pwd)
images=${1:-$root/cells/target/x86_64-unknown-linux-gnu/release}
work=$(mktemp -d)
qemu=
failed=0
patience_s=60

stop() {
    if [ -n "$qemu" ]; then
        kill "$qemu" 2>/dev/null
        wait "$qemu" 2>/dev/null
        qemu=
    fi
}
trap 'stop; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

for tool in qemu-system-x86_64 curl sha256sum timeout; do
    command -v "$tool" >/dev/null || { echo "boot: $tool is missing" >&2; exit 2; }
done
for image in httpd echo; do
    [ -f "$images/$image" ] || { echo "boot: no $images/$image; run 'cargo build --release' in cells/" >&2; exit 2; }
done

check() { # check NAME GOT WANT
    if [ "$2" = "$3" ]; then
        echo "ok    $1"
    else
        echo "FAIL  $1: expected '$3', got '$2'"
        failed=1
    fi
}

now_ms() { echo $(($(date +%s%N) / 1000000)); }

free_port() { # a port that nothing listens on now
    local port
    while :; do
        port=$((20000 + RANDOM % 12000))
        grep -qi ":$(printf %04X $port) " /proc/net/tcp /proc/net/udp || { echo "$port"; return; }
    done
}

machine() { # sets `arguments` for a machine's name
    case $1 in
    microvm-legacy) arguments=(-M microvm,accel=tcg,acpi=off -device virtio-net-device,netdev=n0) ;;
    microvm-modern) arguments=(-M microvm,accel=tcg,acpi=off -global virtio-mmio.force-legacy=false
        -device virtio-net-device,netdev=n0) ;;
    microvm-acpi) arguments=(-M microvm,accel=tcg -device virtio-net-device,netdev=n0) ;;
    microvm-pcie) arguments=(-M microvm,accel=tcg,pcie=on -device virtio-net-pci,netdev=n0,romfile=) ;;
    q35-msix) arguments=(-M q35,accel=tcg -device virtio-net-pci,netdev=n0,romfile=) ;;
    q35-qboot) arguments=(-M q35,accel=tcg -bios qboot.rom -device virtio-net-pci,netdev=n0,romfile=) ;;
    q35-port) arguments=(-M q35,accel=tcg -device pcie-root-port,id=rp,chassis=1
        -device virtio-net-pci,netdev=n0,romfile=,bus=rp) ;;
    q35-polled) arguments=(-M q35,accel=tcg -device virtio-net-pci,netdev=n0,romfile=,vectors=0) ;;
    esac
    arguments+=(-display none -nodefaults -no-reboot -device isa-debug-exit,iobase=0xf4,iosize=4)
}

start() { # start MACHINE IMAGE GUEST_PORT MEMORY [COMMAND LINE]; waits until the network is up
    machine "$1"
    port=$(free_port)
    : >"$work/console"
    started_ms=$(now_ms)
    timeout 600 qemu-system-x86_64 "${arguments[@]}" -m "$4" -serial "file:$work/console" -kernel "$images/$2" -append "${5:-}" \
        -netdev "user,id=n0,hostfwd=tcp:127.0.0.1:$port-:$3,hostfwd=udp:127.0.0.1:$port-:$3" </dev/null 2>"$work/stderr" &
    qemu=$!
    local deadline_ms=$((started_ms + patience_s * 1000))
    until grep -q "net up" "$work/console"; do
        if ! kill -0 "$qemu" 2>/dev/null || [ "$(now_ms)" -gt "$deadline_ms" ]; then
            echo "FAIL  $1: the network did not come up; the console's end:"
            tail -n 5 "$work/console" "$work/stderr"
            failed=1
            return 1
        fi
        read -rt 0.002 <> <(:) || :
    done
}

until_accepted() { # waits until no connection to a port waits for `accept`, as the second half of tx_queue:rx_queue says
    local deadline_ms=$(($(now_ms) + patience_s * 1000))
    until grep -qi ":$(printf %04X "$1") 00000000:0000 0A [0-9A-F]*:00000000 " /proc/net/tcp; do
        [ "$(now_ms)" -gt "$deadline_ms" ] && return 1
        read -rt 0.002 <> <(:) || :
    done
}

get() { curl -s -m "$patience_s" "$@"; }

pattern_sum() { # the checksum of the first $1 bytes of the pattern
    awk 'BEGIN { for (i = 0; i < 251; i++) printf "%02x", i }' >"$work/hex"
    # One period as bytes, then doubled until it is long enough.
    printf "$(sed 's/../\\x&/g' "$work/hex")" >"$work/pattern"
    while [ "$(stat -c %s "$work/pattern")" -lt "$1" ]; do
        cat "$work/pattern" "$work/pattern" >"$work/twice"
        mv "$work/twice" "$work/pattern"
    done
    head -c "$1" "$work/pattern" | sha256sum | cut -d ' ' -f 1
}

size=3000001
want_sum=$(pattern_sum $size)

for name in microvm-legacy microvm-modern microvm-acpi microvm-pcie q35-msix q35-qboot q35-port q35-polled; do
    start $name httpd 80 32 || { stop; continue; }
    code=$(get -o /dev/null -w '%{http_code}' "http://127.0.0.1:$port/")
    first_ms=$(($(now_ms) - started_ms))
    check "$name: first reply, $first_ms ms after the start" "$code" 200
    sum=$(get "http://127.0.0.1:$port/bytes/$size" | sha256sum | cut -d ' ' -f 1)
    check "$name: $size bytes have the right checksum" "$sum" "$want_sum"
    stop
done

if start microvm-legacy httpd 80 32; then
    base="http://127.0.0.1:$port"
    for pair in /other:404 /bytes/:404 /bytes/1073741825:400 /bytes/0:200; do
        check "httpd: ${pair%:*}" "$(get -o /dev/null -w '%{http_code}' "$base${pair%:*}")" "${pair##*:}"
    done
    check "httpd: POST" "$(get -o /dev/null -w '%{http_code}' -X POST "$base/")" 405
    check "httpd: a body" "$(get -o /dev/null -w '%{http_code}' -d x=1 "$base/")" 413
    exec 3<>"/dev/tcp/127.0.0.1/$port"
    printf 'nonsense\r\n\r\n' >&3
    check "httpd: nonsense" "$(timeout "$patience_s" head -n 1 <&3 | tr -d '\r')" "HTTP/1.1 400 Bad Request"
    exec 3>&-
    # All open before the first byte is asked for. User networking listens with room for one: a connection before the last
    # one is accepted would wait for its second SYN, a second later, and the first of 64 beyond the server's 30 s for a request.
    many=()
    for _ in $(seq 64); do
        exec {fd}<>"/dev/tcp/127.0.0.1/$port" && many+=("$fd")
        until_accepted "$port"
    done
    for fd in "${many[@]}"; do
        printf 'GET /bytes/400001 HTTP/1.0\r\n\r\n' >&"$fd"
    done
    right=0
    sum=$(pattern_sum 400001)
    for fd in "${many[@]}"; do
        [ "$(timeout "$patience_s" cat <&"$fd" | tail -c 400001 | sha256sum | cut -d ' ' -f 1)" = "$sum" ] && right=$((right + 1))
        exec {fd}>&-
    done
    check "httpd: 64 connections at a time in 32 MiB" "$right" 64
    # A connection that takes nothing does not keep others waiting.
    exec 3<>"/dev/tcp/127.0.0.1/$port"
    printf 'GET /bytes/1073741824 HTTP/1.1\r\n\r\n' >&3
    check "httpd: beside a stalled download" "$(get -o /dev/null -w '%{http_code}' "$base/")" 200
    exec 3>&-
fi
stop

if start microvm-legacy httpd 80 32; then
    ticks() { awk '{ print $14 + $15 }' "/proc/$1/stat"; }
    # `timeout` comes before QEMU; its only child is the emulator.
    emulator=$(cat "/proc/$qemu/task/$qemu/children")
    emulator=${emulator%% *}
    hz=$(getconf CLK_TCK)
    # A machine that does other things besides may cost a span; who never comes to rest never has an idle one.
    for _ in 1 2 3 4 5; do
        before=$(ticks "$emulator")
        sleep 3 # the span that is measured
        spent=$(($(ticks "$emulator") - before))
        percent_tenths=$((spent * 1000 / (3 * hz)))
        # A running emulator has used some time; none at all would mean that another process was looked at.
        [ "${before:-0}" -gt 0 ] && [ "$percent_tenths" -le 30 ] && idle=idle || idle=busy
        [ "$idle" = idle ] && break
    done
    check "idle: the emulator used $((percent_tenths / 10)).$((percent_tenths % 10)) % of a core in 3 s" "$idle" idle
fi
stop

if start microvm-modern echo 7 8; then
    exec 3<>"/dev/tcp/127.0.0.1/$port"
    echo "over TCP" >&3
    IFS= read -r -t "$patience_s" -u 3 answer
    exec 3>&-
    check "echo: TCP, in 8 MiB" "$answer" "over TCP"
    exec 3<>"/dev/udp/127.0.0.1/$port"
    echo "over UDP" >&3
    # Not `read`, which takes single bytes and so cuts a datagram.
    answer=$(timeout "$patience_s" dd bs=2048 count=1 <&3 2>/dev/null)
    exec 3>&-
    check "echo: UDP" "$answer" "over UDP"
fi
stop

# What must end the cell: by which status, with which words.
end() { # end NAME COMMAND_LINE STATUS WORDS
    machine microvm-legacy
    timeout "$patience_s" qemu-system-x86_64 "${arguments[@]}" -m 32 -serial "file:$work/console" -kernel "$images/echo" \
        -append "$2" -netdev user,id=n0 </dev/null 2>/dev/null
    check "end: $1, status" $? "$3"
    check "end: $1, message" "$(grep -c -- "$4" "$work/console")" 1
}
end "memcpy and its family" selftest=memory 5 "memcpy and its family are in order"
end "panic" selftest=panic 33 "selftest=panic"
end "stack overflow" selftest=stack 37 "the stack overflowed"
end "write to constants" selftest=write 35 "write to read-only memory"
end "execution of data" selftest=execute 35 "execution of data"
end "null pointer" selftest=null 35 "null pointer"
end "wrong command line" ip=10.0.0.300/24 3 "command line: ip=10.0.0.300/24: expected"

exit $failed
