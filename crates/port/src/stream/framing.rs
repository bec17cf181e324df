//! The framing of QEMU's stream sockets: each frame behind its length as a big-endian u32, without
//! offload state (QEMU net/stream.c, net/socket.c; passt's tap.c).

use tombolo_switch::frame::MAX_FRAME_BYTES;

/// Bytes of the length before a frame.
pub(crate) const LENGTH_BYTES: usize = 4;
/// Bytes that one call may receive.
const RECEIVE_BYTES: usize = 256 * 1024;
/// With at least this much at hand there is a whole frame, and the socket can wait.
const PLENTY_BYTES: usize = (LENGTH_BYTES + MAX_FRAME_BYTES).next_multiple_of(4096);

/// What came and is not taken yet. Frames are views into it, so nothing is moved while one is in
/// use.
///
/// ```text
/// 0 … taken … start … frames, the last one perhaps in part … end … room for the next receive … len
/// ```
pub(crate) struct Inbox {
    arena: Vec<u8>,
    start: usize,
    end: usize,
}

/// A length that no frame has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadLength(pub(crate) u32);

impl Inbox {
    pub(crate) fn new() -> Inbox {
        Inbox { arena: vec![0; PLENTY_BYTES + RECEIVE_BYTES], start: 0, end: 0 }
    }

    pub(crate) fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// What is not taken yet.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.arena[self.start..self.end]
    }

    /// Holds `bytes` and nothing else; whether there was room.
    pub(crate) fn refill(&mut self, bytes: &[u8]) -> bool {
        self.clear();
        let Some(room) = self.arena.get_mut(..bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        self.end = bytes.len();
        true
    }

    /// Bytes that are not taken yet.
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    /// Where to receive to; `None` while plenty is at hand.
    pub(crate) fn room(&mut self) -> Option<&mut [u8]> {
        if self.len() >= PLENTY_BYTES {
            return None;
        }
        if self.start == self.end {
            self.clear();
        } else if self.arena.len() - self.end < RECEIVE_BYTES {
            // Less than PLENTY_BYTES, once in several receives.
            self.arena.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let end = self.end;
        Some(&mut self.arena[end..end + RECEIVE_BYTES])
    }

    /// `n` bytes were received into the room.
    pub(crate) fn filled(&mut self, n: usize) {
        self.end = (self.end + n).min(self.arena.len());
    }

    /// The length of the frame at `start`, where its four bytes are there.
    fn length_at(&self, start: usize) -> Option<u32> {
        let bytes = self.arena[start..self.end].first_chunk::<LENGTH_BYTES>()?;
        Some(u32::from_be_bytes(*bytes))
    }

    /// Whether a whole frame is at hand, or a length that none has.
    pub(crate) fn has_frame(&self) -> bool {
        self.length_at(self.start).is_some_and(|len| !valid(len) || self.len() >= LENGTH_BYTES + len as usize)
    }

    /// Takes up to `budget` whole frames; returns how many. Stops before a length that no frame
    /// has.
    pub(crate) fn take<'m>(
        &'m mut self,
        budget: usize,
        mut each: impl FnMut(&'m [u8]),
    ) -> (usize, Result<(), BadLength>) {
        let mut start = self.start;
        let mut count = 0;
        let mut result = Ok(());
        while count < budget {
            let Some(len) = self.length_at(start) else { break };
            if !valid(len) {
                result = Err(BadLength(len));
                break;
            }
            let next = start + LENGTH_BYTES + len as usize;
            if next > self.end {
                break;
            }
            start = next;
            count += 1;
        }
        let from = self.start;
        self.start = start;
        // Only now is the arena lent out, for as long as the frames live.
        let mut rest: &'m [u8] = &self.arena[from..start];
        while let Some((length, behind)) = rest.split_first_chunk::<LENGTH_BYTES>() {
            let (frame, next) = behind.split_at(u32::from_be_bytes(*length) as usize);
            each(frame);
            rest = next;
        }
        (count, result)
    }
}

fn valid(len: u32) -> bool {
    len != 0 && len as usize <= MAX_FRAME_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::frame;
    use tombolo_testing::Random;

    fn framed(frames: &[Vec<u8>]) -> Vec<u8> {
        frames.iter().flat_map(|f| [&(f.len() as u32).to_be_bytes()[..], f].concat()).collect()
    }

    #[test]
    fn golden_bytes() {
        let mut inbox = Inbox::new();
        inbox.room().unwrap()[..7].copy_from_slice(&[0, 0, 0, 3, 7, 8, 9]);
        inbox.filled(7);
        let mut got = Vec::new();
        assert_eq!(inbox.take(5, |f| got.push(f.to_vec())), (1, Ok(())));
        assert_eq!(got, [[7, 8, 9]]);
    }

    #[test]
    fn frames_come_out_whole_however_the_stream_is_cut() {
        let mut random = Random::seeded();
        let frames: Vec<_> = (0..3000)
            .map(|n| match random.within(0, 19) {
                0 => frame(n, MAX_FRAME_BYTES),
                _ => frame(n, random.within(1, 1600)),
            })
            .collect();
        let stream = framed(&frames);
        let (mut inbox, mut at, mut got) = (Inbox::new(), 0, Vec::new());
        while got.len() < frames.len() {
            let plenty = inbox.len() >= PLENTY_BYTES;
            if let Some(room) = inbox.room() {
                let n = random.within(1, 100_000).min(stream.len() - at).min(room.len());
                room[..n].copy_from_slice(&stream[at..at + n]);
                inbox.filled(n);
                at += n;
            } else {
                assert!(plenty && inbox.has_frame());
            }
            let (budget, had) = (random.within(1, 70), inbox.has_frame());
            let (count, result) = inbox.take(budget, |f| got.push(f.to_vec()));
            assert_eq!(result, Ok(()));
            assert!(count <= budget && had == (count > 0));
        }
        assert!(got == frames);
        assert_eq!((at, inbox.len()), (stream.len(), 0));
    }

    #[test]
    fn a_length_that_no_frame_has_is_told_after_the_frames_before_it() {
        for bad in [0, MAX_FRAME_BYTES as u32 + 1, u32::MAX] {
            let mut inbox = Inbox::new();
            let stream = [framed(&[frame(1, 60)]), bad.to_be_bytes().to_vec()].concat();
            inbox.room().unwrap()[..stream.len()].copy_from_slice(&stream);
            inbox.filled(stream.len());
            let mut got = Vec::new();
            assert_eq!(inbox.take(1, |f| got.push(f.len())), (1, Ok(())));
            assert!(inbox.has_frame(), "the worker has to come back for the fault");
            assert_eq!(inbox.take(1, |f| got.push(f.len())), (0, Err(BadLength(bad))));
            assert_eq!(got, [60]);
        }
    }

    #[test]
    fn a_part_of_a_frame_is_none() {
        let stream = framed(&[frame(1, 60)]);
        for n in 0..stream.len() {
            let mut inbox = Inbox::new();
            inbox.room().unwrap()[..n].copy_from_slice(&stream[..n]);
            inbox.filled(n);
            assert!(!inbox.has_frame(), "{n} bytes");
            assert_eq!(inbox.take(9, |_| panic!("{n} bytes are no frame")), (0, Ok(())));
        }
    }
}
