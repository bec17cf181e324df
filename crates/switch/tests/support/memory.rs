//! A port that costs next to nothing: its frames lie in memory, and what it is given is copied into
//! a buffer that stays hot.
#![allow(missing_docs, unreachable_pub)]

use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_switch::Nanos;
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::{Batch, Offload};
use tombolo_switch::port::{Caps, Carrier, Fault, Port, Sent};

/// When a port has frames again.
#[allow(dead_code)] // each user takes its own
#[derive(Clone, Copy)]
pub enum Refill {
    /// With each service: all its frames.
    Service,
    /// With each wake-up: its first frame, so often.
    Wake(usize),
}

pub struct Memory {
    frames: Vec<(Vec<u8>, Offload)>,
    refill: Refill,
    left: usize,
    caps: Caps,
    buffer: Vec<u8>,
    may_merge: bool,
}

impl Memory {
    pub fn new(frames: Vec<(Vec<u8>, Offload)>, refill: Refill, caps: Caps) -> Memory {
        Memory { frames, refill, left: 0, caps, buffer: vec![0; 70_000], may_merge: false }
    }

    /// Says that segments of one stream are worth looking for.
    #[allow(dead_code)] // only one of the files that have this module does
    pub fn merging(self) -> Memory {
        Memory { may_merge: true, ..self }
    }
}

impl Port for Memory {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn link(&self) -> Carrier {
        Carrier::Up
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn service(&mut self, _: Nanos) -> Result<Option<Nanos>, Fault> {
        if let Refill::Service = self.refill {
            self.left = self.frames.len();
        }
        Ok(None)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, _: &mut Drops) -> Result<usize, Fault> {
        let n = budget.min(self.left);
        self.left -= n;
        if self.may_merge {
            batch.set_may_merge();
        }
        for index in self.left..self.left + n {
            // The frames represent as many as are left, in turn.
            let (bytes, offload) = &self.frames[index % self.frames.len()];
            batch.push(Foreign::from(&bytes[..]), *offload);
        }
        Ok(n)
    }

    fn release(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], _: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        for index in which {
            let frame = &batch.frames()[*index as usize];
            sent.bytes += batch.copy(frame, ForeignMut::from(&mut self.buffer[..])) as u64;
            sent.frames += 1;
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        // Work for one step of the worker is what one refill brings.
        Ok(false)
    }

    fn disarm(&mut self) {
        if let Refill::Wake(count) = self.refill {
            self.left = count;
        }
    }

    fn reset(&mut self, _: &Fault) {}
}
