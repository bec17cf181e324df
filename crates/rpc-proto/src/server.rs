//! Who serves: from a request's bytes to a method, and back.

use prost::Message;
use tombolo_rpc::provider::{self, Handler, Reply, Request};

use crate::envelope;
use crate::status::{Code, Status};

/// What a method is told besides its message.
#[derive(Debug)]
pub struct Context<'a>(&'a Request<'a>);

impl Context<'_> {
    /// The absolute deadline in ns of CLOCK_MONOTONIC; `None` for best effort. Calls that the
    /// method makes inherit it.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.0.deadline_ns()
    }

    /// What is left until the deadline, in ns; 0 when it has passed, `None` for best effort.
    pub fn left_ns(&self) -> Option<u64> {
        self.0.left_ns()
    }

    /// How long the request waited, ns.
    pub fn queued_ns(&self) -> u64 {
        self.0.queued_ns()
    }

    /// What the caller put in to follow a call through several services.
    pub fn trace(&self) -> u64 {
        self.0.trace()
    }

    /// Who calls, as the kernel says.
    pub fn caller(&self) -> provider::Caller {
        self.0.caller()
    }
}

/// A request for a method, for generated code.
#[derive(Debug)]
pub struct Call<'a> {
    context: Context<'a>,
    message: &'a [u8],
}

/// A service's methods; implemented by generated code.
pub trait Methods: Send + Sync + 'static {
    /// The service's full name: "package.Service".
    fn service(&self) -> &'static str;

    /// Calls a method, and encodes what it returns. `None` where there is no method of that name.
    fn call(&self, method: &str, call: &Call<'_>) -> Option<Result<Vec<u8>, Status>>;
}

/// Decodes, calls, encodes; for generated code.
///
/// # Errors
/// The method's, or [`Code::InvalidArgument`] for a message that cannot be decoded.
pub fn unary<Q: Message + Default, A: Message>(
    call: &Call<'_>,
    method: impl FnOnce(&Context<'_>, Q) -> Result<A, Status>,
) -> Result<Vec<u8>, Status> {
    let request = Q::decode(call.message)
        .map_err(|error| Status::new(Code::InvalidArgument, format!("the message cannot be decoded: {error}")))?;
    Ok(method(&call.context, request)?.encode_to_vec())
}

/// The services that are called under one name: the handler of a [`provider::Service`].
#[derive(Default)]
pub struct Router {
    services: Vec<Box<dyn Methods>>,
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.services.iter().map(|service| service.service())).finish()
    }
}

impl Router {
    /// One with no service yet.
    pub fn new() -> Router {
        Router::default()
    }

    /// With one more service; it takes the place of one with the same name.
    #[must_use]
    pub fn with(mut self, service: impl Methods) -> Router {
        self.services.retain(|known| known.service() != service.service());
        self.services.push(Box::new(service));
        self
    }

    fn answer(&self, request: &Request<'_>) -> Result<Vec<u8>, Status> {
        // What a client writes while it is read is looked at in a copy.
        let bytes = request.to_vec();
        let (service, method, message) = envelope::parse(&bytes)?;
        let unknown = |what: &str, name: &str| Status::new(Code::Unimplemented, format!("no {what} \"{name}\" here"));
        let found = self.services.iter().find(|known| known.service() == service);
        let found = found.ok_or_else(|| unknown("service", service))?;
        let call = Call { context: Context(request), message };
        found.call(method, &call).unwrap_or_else(|| Err(unknown("method", method)))
    }
}

impl Handler for Router {
    fn serve(&self, request: &Request<'_>, reply: &mut Reply<'_>) {
        let answer = self.answer(request);
        let bytes = match &answer {
            Ok(message) => message.as_slice(),
            Err(status) => {
                reply.set_code(status.code() as u32);
                status.message().as_bytes()
            }
        };
        // No room for the reply is answered as such.
        let _ = reply.write(bytes);
    }
}
