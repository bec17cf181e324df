//! Who may use the page: one-time tokens, which the terminal shows, and the sessions that browsers
//! get for them.
//!
//! # Invariants
//! - A token opens one session, within [`TOKEN_LIFETIME`]. A new token replaces one that was not
//!   used.
//! - At most [`MAX_SESSIONS`] exist. A further one ends the one that was not used for longest: only
//!   who reads the terminal can open one.
//! - Secrets have 256 bits from the kernel, and are compared in constant time.

use std::time::{Duration, Instant};

/// How long a token can be used.
pub(super) const TOKEN_LIFETIME: Duration = Duration::from_secs(600);
/// Browsers at one time.
pub(super) const MAX_SESSIONS: usize = 8;
/// How long a session lives without a request.
pub(super) const IDLE: Duration = Duration::from_secs(12 * 3600);

/// A secret of 256 bits, as 64 hexadecimal digits.
#[derive(Clone)]
struct Secret(String);

impl Secret {
    fn new() -> std::io::Result<Secret> {
        let mut bytes = [0u8; 32];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        Ok(Secret(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Whether it is that, in a time that does not tell how much of it is.
    fn is(&self, other: &str) -> bool {
        let (a, b) = (self.0.as_bytes(), other.as_bytes());
        a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    }
}

/// The token that was shown last, and the sessions.
#[derive(Default)]
pub(super) struct Sessions {
    token: Option<(Secret, Instant)>,
    sessions: Vec<(Secret, Instant)>,
}

impl Sessions {
    /// A new token, in place of one that was not used.
    ///
    /// # Errors
    /// If the kernel gives no random numbers.
    pub(super) fn token(&mut self, now: Instant) -> std::io::Result<String> {
        let token = Secret::new()?;
        self.token = Some((token.clone(), now));
        Ok(token.0)
    }

    /// A session for a token, once; `None` if that is not the token, or not any more.
    ///
    /// # Errors
    /// If the kernel gives no random numbers.
    pub(super) fn open(&mut self, token: &str, now: Instant) -> std::io::Result<Option<String>> {
        self.forget(now);
        if !self.token.as_ref().is_some_and(|(known, _)| known.is(token)) {
            return Ok(None);
        }
        self.token = None;
        if self.sessions.len() >= MAX_SESSIONS
            && let Some(oldest) = (0..self.sessions.len()).min_by_key(|&at| self.sessions[at].1)
        {
            self.sessions.swap_remove(oldest);
        }
        let session = Secret::new()?;
        self.sessions.push((session.clone(), now));
        Ok(Some(session.0))
    }

    /// Whether that is a session; it was used then.
    pub(super) fn knows(&mut self, session: &str, now: Instant) -> bool {
        self.forget(now);
        // All are compared, whichever it is.
        let mut found = false;
        for (secret, used) in &mut self.sessions {
            if secret.is(session) {
                *used = now;
                found = true;
            }
        }
        found
    }

    /// Ends a session.
    pub(super) fn close(&mut self, session: &str) {
        self.sessions.retain(|(secret, _)| !secret.is(session));
    }

    fn forget(&mut self, now: Instant) {
        self.token = self.token.take().filter(|(_, made)| now.duration_since(*made) < TOKEN_LIFETIME);
        self.sessions.retain(|(_, used)| now.duration_since(*used) < IDLE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_opens_one_session_and_only_in_time() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        let token = sessions.token(now).unwrap();
        assert_eq!(token.len(), 64);
        for wrong in ["", "x", &token[1..], &"0".repeat(64), &token.to_uppercase().replace('A', "b")] {
            assert!(sessions.open(wrong, now).unwrap().is_none(), "{wrong}");
        }
        let session = sessions.open(&token, now).unwrap().unwrap();
        assert!(sessions.open(&token, now).unwrap().is_none(), "used already");
        assert!(sessions.knows(&session, now) && !sessions.knows(&token, now) && !sessions.knows("", now));
        let late = sessions.token(now).unwrap();
        assert!(sessions.open(&late, now + TOKEN_LIFETIME).unwrap().is_none());
        let (first, second) = (sessions.token(now).unwrap(), sessions.token(now).unwrap());
        assert!(sessions.open(&first, now).unwrap().is_none(), "replaced");
        assert!(sessions.open(&second, now).unwrap().is_some());
        sessions.close(&session);
        assert!(!sessions.knows(&session, now));
    }

    #[test]
    fn sessions_are_bounded_and_end_when_they_are_not_used() {
        let (mut sessions, start) = (Sessions::default(), Instant::now());
        let mut open = |at| {
            let token = sessions.token(at).unwrap();
            sessions.open(&token, at).unwrap().unwrap()
        };
        let all: Vec<_> = (0..MAX_SESSIONS as u64).map(|n| open(start + Duration::from_secs(n))).collect();
        let now = start + Duration::from_secs(100);
        assert!(sessions.knows(&all[0], now), "used last of all");
        let token = sessions.token(now).unwrap();
        let further = sessions.open(&token, now).unwrap().unwrap();
        let known: Vec<_> = all.iter().map(|one| sessions.knows(one, now)).collect();
        assert_eq!(known, (0..MAX_SESSIONS).map(|n| n != 1).collect::<Vec<_>>());
        assert!(sessions.knows(&further, now + IDLE - Duration::from_secs(1)));
        assert!(!sessions.knows(&further, now + 2 * IDLE));
    }
}
