//! The terminal: raw for a console, kept unchanged for a screen that refreshes, and restored in
//! every case.

use std::io::{self, Read, Write};
use std::sync::mpsc::{Receiver, channel};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// Standard input as a raw terminal, until dropped.
pub(crate) struct Raw(Termios);

impl Raw {
    pub(crate) fn new() -> io::Result<Raw> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Raw(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that is gone needs no putting back.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Keys as they are pressed, from standard input, until dropped. Ctrl-C stays a signal.
pub(crate) struct Keys {
    before: Termios,
    pressed: Receiver<u8>,
}

impl Keys {
    pub(crate) fn new() -> io::Result<Keys> {
        let before = tcgetattr(io::stdin())?;
        let mut single = before.clone();
        single.local_modes &= !(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(io::stdin(), OptionalActions::Now, &single)?;
        let (sender, pressed) = channel();
        // Made first: its end sets the terminal as it was.
        let keys = Keys { before, pressed };
        // It ends with the process: nothing else ends a read from a terminal.
        std::thread::Builder::new().spawn(move || {
            let mut byte = [0];
            while let Ok(1) = io::stdin().lock().read(&mut byte) {
                if sender.send(byte[0]).is_err() {
                    return;
                }
            }
        })?;
        Ok(keys)
    }

    /// The next key that was pressed, if one was.
    pub(crate) fn next(&self) -> Option<u8> {
        self.pressed.try_recv().ok()
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // A terminal that is gone needs no putting back.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Columns of the terminal that standard output is; 80 where it does not say.
pub(crate) fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|s| s.ws_col > 0);
    size.map_or(80, |s| usize::from(s.ws_col))
}

/// The alternate screen without a cursor, until dropped.
pub(crate) struct Screen;

impl Screen {
    pub(crate) fn new() -> io::Result<Screen> {
        let mut out = io::stdout().lock();
        out.write_all(b"\x1b[?1049h\x1b[?25l")?;
        out.flush()?;
        Ok(Screen)
    }

    /// Shows `text` in place of what was shown, cut to the terminal's size.
    pub(crate) fn show(&self, text: &str) -> io::Result<()> {
        // A terminal that does not know its size says 0.
        let size = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|s| s.ws_row > 0 && s.ws_col > 0);
        let (rows, columns) = size.map_or((24, 80), |s| (usize::from(s.ws_row.max(2)), usize::from(s.ws_col.max(20))));
        let mut page = String::from("\x1b[H");
        for line in text.lines().take(rows - 1) {
            page.push_str(&cut(line, columns));
            page.push_str("\x1b[K\r\n");
        }
        page.push_str("\x1b[J");
        let mut out = io::stdout().lock();
        out.write_all(page.as_bytes())?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = io::stdout().lock().write_all(b"\x1b[?25h\x1b[?1049l");
        let _ = io::stdout().lock().flush();
    }
}

/// The first `columns` characters of a line; escape sequences take no room.
fn cut(line: &str, columns: usize) -> String {
    let (mut out, mut used, mut escape) = (String::new(), 0, false);
    for c in line.chars() {
        if escape || c == '\x1b' {
            escape = !c.is_ascii_alphabetic();
            out.push(c);
        } else if used < columns {
            used += 1;
            out.push(c);
        }
    }
    out
}

/// Ctrl-], which leaves a console.
const LEAVE: u8 = 0x1d;

/// What is typed: from a terminal until Ctrl-]; from a pipe until its end, which does not end the
/// console.
pub(crate) struct Typing<R> {
    input: R,
    terminal: bool,
    over: bool,
}

impl<R: Read> Typing<R> {
    pub(crate) fn new(input: R, terminal: bool) -> Self {
        Typing { input, terminal, over: false }
    }
}

impl<R: Read> Read for Typing<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.over {
            return Ok(0);
        }
        let n = self.input.read(buf)?;
        if self.terminal {
            if let Some(at) = buf[..n].iter().position(|b| *b == LEAVE) {
                self.over = true;
                return Ok(at);
            }
        } else if n == 0 {
            // Nothing more will be typed; what the machine answers is read on, until it or the user
            // ends.
            loop {
                std::thread::park();
            }
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_escape_ends_a_terminals_typing_and_is_not_typed() {
        let mut typed = Vec::new();
        Typing::new(&b"ls\n\x1drest"[..], true).read_to_end(&mut typed).unwrap();
        assert_eq!(typed, b"ls\n");
        let mut pipe = Typing::new(&b"ls\x1d\n"[..], false);
        let mut buffer = [0; 16];
        assert_eq!(pipe.read(&mut buffer).unwrap(), 4, "in a pipe it is a byte like others");
    }

    #[test]
    fn lines_are_cut_by_what_is_seen_of_them() {
        assert_eq!(cut("abcdef", 3), "abc");
        assert_eq!(cut("\x1b[31mabcdef\x1b[0m", 3), "\x1b[31mabc\x1b[0m");
    }
}
