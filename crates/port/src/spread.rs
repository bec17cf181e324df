//! Spreads frames over the queues of a port, so that each flow stays on one of them and in order.

use tombolo_switch::frame::{Batch, Frame};

/// Frames sorted by their queue. Its lists are reused, so a warm port takes no memory.
#[derive(Debug, Default)]
pub(crate) struct Spread {
    lists: Vec<Vec<u16>>,
}

impl Spread {
    /// Sorts the frames `which` of `batch` by their queue, each looked at once. The result has
    /// `queues` lists, which keep the order of `which`; `queues` is not 0.
    pub(crate) fn sort(&mut self, batch: &Batch<'_>, which: &[u16], queues: usize) -> &[Vec<u16>] {
        if self.lists.len() < queues {
            self.lists.resize_with(queues, Vec::new);
        }
        let lists = &mut self.lists[..queues];
        lists.iter_mut().for_each(Vec::clear);
        for index in which {
            lists[queue_of(&batch.frames()[usize::from(*index)], queues)].push(*index);
        }
        lists
    }
}

/// The queue of a frame among `queues`, which is not 0: by IP addresses, and by the ports of TCP
/// and UDP where every packet of a flow has them; other frames by MAC addresses and type.
pub(crate) fn queue_of(frame: &Frame, queues: usize) -> usize {
    // FNV-1a: short inputs, no adversary that could gain more than its own imbalance. The high
    // bits, since the low ones of this hash know only the low ones of its input.
    let hash = flow_bytes(frame.head())
        .into_iter()
        .flatten()
        .fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    ((u64::from(hash) * queues as u64) >> 32) as usize
}

/// The bytes of a frame's head that all frames of its flow have in common, in two parts.
fn flow_bytes(head: &[u8]) -> [&[u8]; 2] {
    const TCP: u8 = 6;
    const UDP: u8 = 17;
    let mut at = 12;
    let ethertype = |at: usize| head.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    while matches!(ethertype(at), Some(0x8100 | 0x88a8)) {
        at += 4;
    }
    let ip = head.get(at + 2..).unwrap_or(&[]);
    let part = |from: usize, bytes: usize| ip.get(from..from + bytes);
    match ethertype(at) {
        Some(0x0800) if ip.len() >= 20 => {
            // Only the first of several fragments has ports, so no fragment is spread by them.
            let fragment = u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0;
            let has_ports = matches!(ip[9], TCP | UDP) && !fragment;
            let ports = part(usize::from(ip[0] & 15) * 4, 4).filter(|_| has_ports);
            [&ip[12..20], ports.unwrap_or(&[])]
        }
        Some(0x86dd) if ip.len() >= 40 => {
            let ports = part(40, 4).filter(|_| matches!(ip[6], TCP | UDP));
            [&ip[8..40], ports.unwrap_or(&[])]
        }
        _ => [&head[..head.len().min(14)], &[]],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_ring::mem::Foreign;
    use tombolo_switch::frame::Offload;

    /// `len` bytes of an IPv4 frame without ports, filled with `fill`.
    fn frame(len: usize, fill: u8) -> Vec<u8> {
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        bytes.resize(len, fill);
        bytes
    }

    #[test]
    fn lists_have_each_frame_once_in_order_and_are_reused() {
        let bytes: Vec<_> = (0..40u8).map(|flow| frame(64, flow)).collect();
        let mut batch = Batch::with_capacity(bytes.len());
        bytes.iter().for_each(|bytes| batch.push(Foreign::from(&bytes[..]), Offload::NONE));
        let which: Vec<u16> = (0..40).filter(|index| index % 3 != 0).collect();
        let mut spread = Spread::default();
        for queues in [1, 4, 128, 3] {
            let lists = spread.sort(&batch, &which, queues);
            assert_eq!(lists.len(), queues);
            for (queue, list) in lists.iter().enumerate() {
                assert!(list.is_sorted());
                assert!(list.iter().all(|index| queue_of(&batch.frames()[usize::from(*index)], queues) == queue));
            }
            let mut all = lists.concat();
            all.sort_unstable();
            assert_eq!(all, which);
            let places: Vec<_> = lists.iter().map(|list| (list.as_ptr(), list.capacity())).collect();
            let again: Vec<_> =
                spread.sort(&batch, &which, queues).iter().map(|list| (list.as_ptr(), list.capacity())).collect();
            assert_eq!(places, again, "no list takes memory again");
        }
    }

    #[test]
    fn a_flow_stays_on_its_queue() {
        let queue = |bytes: &[u8]| {
            let mut batch = Batch::with_capacity(1);
            batch.push(Foreign::from(bytes), Offload::NONE);
            queue_of(&batch.frames()[0], 64)
        };
        let ip4 = |protocol: u8, port: u8, rest: u8, fragment: u8| {
            let mut bytes = frame(80, rest);
            bytes[14..34].copy_from_slice(&[
                0x45, 0, 0, 66, rest, rest, fragment, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
            ]);
            bytes[34..38].copy_from_slice(&[1, port, 2, port]);
            bytes
        };
        let ip6 = |port: u8, rest: u8| {
            let mut bytes = frame(100, rest);
            bytes[12..14].copy_from_slice(&[0x86, 0xdd]);
            bytes[14..54].fill(0);
            (bytes[14], bytes[19], bytes[20], bytes[37], bytes[53]) = (0x60, rest, 6, 1, 2);
            bytes[54..58].copy_from_slice(&[1, port, 2, port]);
            bytes
        };
        let tagged = |mut bytes: Vec<u8>| {
            bytes.splice(12..12, [0x81, 0, 0, 5]);
            bytes
        };
        let mut queues = std::collections::BTreeSet::new();
        for port in 0..32 {
            for rest in 0..20 {
                // Sequence numbers, flags and checksums say nothing of the flow.
                assert_eq!(queue(&ip4(6, port, rest, 0)), queue(&ip4(6, port, 0, 0)));
                assert_eq!(queue(&ip6(port, rest)), queue(&ip6(port, 0)));
                assert_eq!(queue(&tagged(ip4(17, port, rest, 0))), queue(&ip4(17, port, 0, 0)));
                // Fragments have no ports but in the first one.
                assert_eq!(queue(&ip4(17, port, rest, 0x20)), queue(&ip4(17, 0, 0, 0x20)));
            }
            queues.insert(queue(&ip4(6, port, 0, 0)));
        }
        assert!(queues.len() > 8, "32 flows fell on {} of 64 queues", queues.len());
    }
}
