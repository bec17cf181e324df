//! What is known of a register's bytes while a rule is walked for all frames of a flow at once.
//!
//! Each bit is one of three: known; the same for all frames of a flow, but not known here; or it
//! may vary from frame to frame. A comparison whose result the known bits do not settle, and that
//! looks at a bit that varies, judges each frame.

use super::ruleset::REGISTERS_BYTES;

/// What a flow has, by which a comparison can tell flows apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Field {
    Source,
    Destination,
    SourcePort,
    DestinationPort,
    Input,
    Output,
    InputName,
    OutputName,
}

/// A byte of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Which bits are known.
    pub known: u8,
    /// Their values; 0 where they are not known.
    pub value: u8,
    /// Which bits may vary among the frames of a flow.
    pub varies: u8,
    /// The field and its byte that this is, as far as `mask` goes; the other bits are known.
    pub origin: Option<(Field, u8)>,
    pub mask: u8,
    /// What varies, in words.
    pub what: &'static str,
}

impl Cell {
    /// The same for all frames of a flow.
    pub(crate) const STABLE: Cell = Cell { known: 0, value: 0, varies: 0, origin: None, mask: 0, what: "" };

    pub(crate) const fn exact(value: u8) -> Cell {
        Cell { known: 0xff, value, ..Cell::STABLE }
    }

    /// Of these bits the values are known, the others are the same for all frames of a flow.
    pub(crate) const fn partly(known: u8, value: u8) -> Cell {
        Cell { known, value, ..Cell::STABLE }
    }

    pub(crate) const fn varying(what: &'static str) -> Cell {
        Cell { varies: 0xff, what, ..Cell::STABLE }
    }

    pub(crate) const fn of(field: Field, byte: u8) -> Cell {
        Cell { origin: Some((field, byte)), mask: 0xff, ..Cell::STABLE }
    }

    /// The cell after nftables' `bitwise` expression.
    pub(crate) fn masked(self, mask: u8, xor: u8) -> Cell {
        Cell {
            known: self.known | !mask,
            value: (self.value & mask) ^ xor & (self.known | !mask),
            varies: self.varies & mask,
            origin: self.origin.filter(|_| xor == 0 && self.mask & mask != 0),
            mask: self.mask & mask,
            what: if xor & self.varies & mask == 0 { self.what } else { "what a rule alters" },
        }
    }
}

/// What varies of these bytes, if anything does.
pub(crate) fn varying(cells: &[Cell]) -> Option<&'static str> {
    cells.iter().find(|c| c.varies != 0).map(|c| c.what)
}

/// The bytes, if all of them are known.
pub(crate) fn known(cells: &[Cell]) -> Option<Vec<u8>> {
    cells.iter().map(|c| (c.known == 0xff).then_some(c.value)).collect()
}

#[derive(Clone, Debug)]
pub(crate) struct Registers([Cell; REGISTERS_BYTES]);

impl Registers {
    pub(crate) fn new() -> Registers {
        Registers([Cell::STABLE; REGISTERS_BYTES])
    }

    /// `length` bytes from `at` on, or as many as there are.
    pub(crate) fn read(&self, at: usize, length: usize) -> &[Cell] {
        let at = at.min(REGISTERS_BYTES);
        &self.0[at..(at + length.min(REGISTERS_BYTES)).min(REGISTERS_BYTES)]
    }

    pub(crate) fn write(&mut self, at: usize, cells: impl IntoIterator<Item = Cell>) {
        for (to, cell) in self.0.iter_mut().skip(at).zip(cells) {
            *to = cell;
        }
    }

    /// Writes bytes, and zeroes up to the end of the last four.
    pub(crate) fn write_exact(&mut self, at: usize, bytes: &[u8]) {
        let padding = bytes.len().next_multiple_of(4) - bytes.len();
        self.write(at, bytes.iter().copied().chain(std::iter::repeat_n(0, padding)).map(Cell::exact));
    }

    /// Fills a register of the longer kind with what one such byte is.
    pub(crate) fn fill(&mut self, at: usize, cell: Cell) {
        self.write(at, std::iter::repeat_n(cell, 16));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_makes_bits_known_and_keeps_the_others_as_they_are() {
        let cell = Cell { known: 0x17, value: 0x10, varies: 0xe8, what: "TCP flags", ..Cell::STABLE };
        let syn = cell.masked(0x02, 0);
        assert_eq!((syn.known, syn.value, syn.varies), (0xff, 0, 0));
        let push = cell.masked(0x18, 0);
        assert_eq!((push.known, push.value, push.varies), (0xf7, 0x10, 0x08));
        let turned = Cell::exact(0xf0).masked(0xff, 0xff);
        assert_eq!((turned.known, turned.value), (0xff, 0x0f));
        // Of a bit that is not known the value stays 0, also where it is turned.
        assert_eq!(Cell::STABLE.masked(0xff, 0xff), Cell::STABLE);
    }

    #[test]
    fn an_origin_is_lost_where_its_bits_are_turned() {
        let byte = Cell::of(Field::Source, 2);
        assert_eq!(byte.masked(0xf0, 0).origin, Some((Field::Source, 2)));
        assert_eq!((byte.masked(0xff, 1).origin, byte.masked(0, 0).origin), (None, None));
    }

    #[test]
    fn registers_end_where_they_end() {
        let mut registers = Registers::new();
        registers.write(60, [Cell::exact(1); 9]);
        assert_eq!((registers.read(60, 16).len(), registers.read(99, 4).len()), (4, 0));
        registers.write_exact(4, &[17]);
        assert_eq!(known(registers.read(4, 4)), Some(vec![17, 0, 0, 0]));
        assert_eq!(known(registers.read(4, 5)), None);
    }
}
