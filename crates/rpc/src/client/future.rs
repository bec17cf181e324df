//! A call as a future, for whichever executor.
//!
//! Futexes are in no reactor, so a client that is used this way gets two threads of its own: one
//! waits for answers on behalf of its futures and wakes them, the other one ends them at their
//! deadlines. They start with the first future and end with the client. A waker is called without
//! any lock of the client's: it may poll its future, or drop others, then and there. A blocking
//! call of another thread on the same client meanwhile is woken by that thread, which costs it a
//! wake-up more; who wants both fast opens two clients.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::{CallError, Client, Reply, Token};

/// A call under way. Dropped before it is done, it is cancelled.
#[derive(Debug)]
pub struct CallFuture {
    client: Client,
    token: Option<Token>,
    failed: Option<CallError>,
}

impl CallFuture {
    pub(super) fn new(client: Client, submitted: Result<Token, CallError>) -> CallFuture {
        match submitted {
            Ok(token) => CallFuture { client, token: Some(token), failed: None },
            Err(error) => CallFuture { client, token: None, failed: Some(error) },
        }
    }
}

impl Future for CallFuture {
    type Output = Result<Reply, CallError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Err(error));
        }
        let Some(token) = self.token else { return Poll::Ready(Err(CallError::Unknown)) };
        match self.client.poll_with(token, context.waker()) {
            None => Poll::Pending,
            Some(done) => {
                self.token = None;
                Poll::Ready(done)
            }
        }
    }
}

impl Drop for CallFuture {
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            self.client.abandon(token);
        }
    }
}
