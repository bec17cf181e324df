//! What carries requests and answers between two peers: the sections of a link, or a stream of
//! bytes.

use alloc::vec::Vec;

use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::{Answer, Ask, Call, Token};

/// Something that came from the peer, its payload copied: read once, checked against the geometry.
#[derive(Debug)]
pub enum Message {
    /// A request, with its payload.
    Call(Call, Vec<u8>),
    /// It takes a request back.
    Cancel(Token),
    /// The answer to a request, with its payload.
    Answer(Answer, Vec<u8>),
}

/// Carries messages both ways. The `payload` of an entry that is given is ignored: the bytes say
/// what it is to be.
pub trait Carrier {
    /// The longest payload, and how many bytes of long ones (longer than an entry holds) may be
    /// under way in one direction.
    fn most(&self) -> usize;

    /// Sends a request, or takes one back. False where there is no room for it now.
    ///
    /// # Errors
    /// What no correct peer does.
    fn ask(&mut self, ask: Ask, bytes: &[u8]) -> Result<bool, Broken>;

    /// Answers. False where there is no room for the bytes now.
    ///
    /// # Errors
    /// What no correct peer does.
    fn answer(&mut self, answer: Answer, bytes: &[u8]) -> Result<bool, Broken>;

    /// The next message that has come; `None` where there is none.
    ///
    /// # Errors
    /// What no correct peer sends.
    fn take(&mut self) -> Result<Option<Message>, Broken>;

    /// Says that we are about to sleep. False where something waits to be taken, and we must not.
    ///
    /// # Errors
    /// What no correct peer does.
    fn arm(&mut self) -> Result<bool, Broken>;
}
