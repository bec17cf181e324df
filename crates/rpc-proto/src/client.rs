//! Who calls: from a message to a request's bytes, and back.

use std::marker::PhantomData;
use std::time::Duration;

use prost::{DecodeError, Message};
use tombolo_rpc::client::{CallError, CallOptions, Client, Reply, Token};

use crate::envelope;
use crate::status::{Code, Status, code_of};

/// How a typed call ended, if not with its message.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The service says why.
    #[error(transparent)]
    Status(#[from] Status),
    /// The call itself did not end with a reply.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The reply is no message of the method's.
    #[error("the reply cannot be decoded: {0}")]
    Undecodable(#[from] DecodeError),
}

impl Error {
    /// The code that fits, wherever the error came from.
    pub fn code(&self) -> Code {
        match self {
            Error::Status(status) => status.code(),
            Error::Call(error) => code_of(error),
            Error::Undecodable(_) => Code::DataLoss,
        }
    }
}

fn message<A: Message + Default>(reply: &Reply) -> Result<A, Error> {
    let bytes = reply.to_vec()?;
    if reply.code() == 0 {
        return Ok(A::decode(&*bytes)?);
    }
    Err(Status::new(Code::from_number(reply.code()), String::from_utf8_lossy(&bytes)).into())
}

/// Calls methods by their names; for generated code.
#[derive(Clone, Debug)]
pub struct Caller(Client);

impl Caller {
    /// Over a connection.
    pub fn new(client: Client) -> Caller {
        Caller(client)
    }

    /// The connection that calls go over.
    pub fn client(&self) -> &Client {
        &self.0
    }

    /// Calls and waits.
    ///
    /// # Errors
    /// [`Error`].
    pub fn call<A: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
        options: &CallOptions,
    ) -> Result<A, Error> {
        message(&self.0.call(&envelope::encode(method, request), options)?)
    }

    /// Calls without waiting.
    ///
    /// # Errors
    /// [`Error::Call`], where the request could not be sent.
    pub fn submit<A: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
        options: &CallOptions,
    ) -> Result<Pending<A>, Error> {
        let token = self.0.submit(&envelope::encode(method, request), options)?;
        Ok(Pending { client: self.0.clone(), token, answer: PhantomData })
    }

    /// Calls, as a future.
    pub fn call_async<Q: Message, A: Message + Default>(
        &self,
        method: &str,
        request: &Q,
        options: &CallOptions,
    ) -> impl Future<Output = Result<A, Error>> + use<Q, A> {
        let call = self.0.call_async(&envelope::encode(method, request), options);
        async { message(&call.await?) }
    }
}

/// A typed call under way.
#[derive(Debug)]
pub struct Pending<A> {
    client: Client,
    token: Token,
    answer: PhantomData<fn() -> A>,
}

impl<A: Message + Default> Pending<A> {
    /// The call's token, for [`Client::wait_any`].
    pub fn token(&self) -> Token {
        self.token
    }

    /// Looks whether the answer has come; `None` while it has not. After that it is fetched, and
    /// the call names nothing any more.
    pub fn poll(&self) -> Option<Result<A, Error>> {
        let done = self.client.poll(self.token)?;
        Some(done.map_err(Error::from).and_then(|reply| message(&reply)))
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// [`Error`]; after [`CallError::Timeout`] the call is cancelled.
    pub fn wait(self, timeout: Duration) -> Result<A, Error> {
        message(&self.client.wait(self.token, timeout)?)
    }

    /// Asks the service to take it back; its answer still comes. False where it is not under way
    /// any more.
    pub fn cancel(&self) -> bool {
        self.client.cancel(self.token)
    }
}
