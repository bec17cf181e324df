//! The blocks of a capture that is being read from the API: what is kept of it ends with a whole
//! one.

use std::io::{self, Write};
use std::ops::ControlFlow;

/// The blocks of a pcapng file (draft-ietf-opsawg-pcapng §3.1), so that what is written ends with a
/// whole one.
#[derive(Debug, Default)]
pub struct Blocks {
    pending: Vec<u8>,
    frames: u64,
}

/// Enhanced packet block.
const FRAME_BLOCK: u32 = 6;
/// The first bytes of each block: type and total length.
const BLOCK_HEAD: usize = 8;

impl Blocks {
    /// Frames written so far.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Writes the blocks that `piece` completes; ends with frame number `limit`.
    ///
    /// # Errors
    /// If it is no pcapng, or `out` fails.
    pub fn feed(&mut self, piece: &[u8], limit: Option<u64>, out: &mut impl Write) -> io::Result<ControlFlow<()>> {
        self.pending.extend_from_slice(piece);
        let mut at = 0;
        let mut flow = ControlFlow::Continue(());
        while let Some(head) = self.pending[at..].first_chunk::<BLOCK_HEAD>() {
            // The fabric writes little-endian sections.
            let word = |i: usize| u32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
            let (kind, length) = (word(0), word(4) as usize);
            if length < BLOCK_HEAD + 4 || length % 4 != 0 {
                return Err(io::Error::other(format!("the capture is not valid pcapng: a block of {length} bytes")));
            }
            if self.pending.len() - at < length {
                break;
            }
            at += length;
            if kind == FRAME_BLOCK {
                self.frames += 1;
                if limit.is_some_and(|n| self.frames >= n) {
                    flow = ControlFlow::Break(());
                    break;
                }
            }
        }
        out.write_all(&self.pending[..at])?;
        out.flush()?;
        self.pending.drain(..at);
        Ok(flow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(kind: u32, body: &[u8]) -> Vec<u8> {
        let length = (12 + body.len()) as u32;
        [&kind.to_le_bytes(), &length.to_le_bytes(), body, &length.to_le_bytes()].concat()
    }

    #[test]
    fn a_file_ends_with_a_whole_block_wherever_it_is_cut() {
        let head = block(0x0a0d_0d0a, &[1; 16]);
        let stream = [head.clone(), block(6, &[2; 24]), block(6, &[3; 8]), block(6, &[4; 8])].concat();
        let two = head.len() + 36 + 20;
        for size in 1..=stream.len() {
            let (mut out, mut blocks) = (Vec::new(), Blocks::default());
            for piece in stream.chunks(size) {
                if blocks.feed(piece, Some(2), &mut out).unwrap().is_break() {
                    break;
                }
            }
            assert_eq!((out.len(), blocks.frames), (two, 2), "pieces of {size}");
            let (mut out, mut blocks) = (Vec::new(), Blocks::default());
            assert!(blocks.feed(&stream[..size], None, &mut out).unwrap().is_continue());
            assert!([0, head.len(), head.len() + 36, two, stream.len()].contains(&out.len()), "cut at {size}");
        }
        assert!(Blocks::default().feed(&[0; 16], None, &mut Vec::new()).is_err());
    }
}
