//! A calculator as a typed service: what is generated from `proto/calculator.proto`, and who serves
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tombolo_rpc_proto::{Code, Context, Router, Status};

/// The messages, the traits, the clients.
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/calculator.rs"));
}

/// The same of `proto/known.proto`, whose messages are made of protobuf's well-known types.
pub mod known {
    include!(concat!(env!("OUT_DIR"), "/known.rs"));
}

use proto::{Calculator, CalculatorServer, History, HistoryServer, Nothing, Number, Numbers, Operands};

/// Serves both services.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    results: Arc<AtomicU64>,
}

impl Machine {
    fn result(&self, value: f64) -> Number {
        // Relaxed: a counter that nothing else depends on.
        self.results.fetch_add(1, Ordering::Relaxed);
        Number { value }
    }

    /// The handler of a service.
    pub fn router(self) -> Router {
        Router::new().with(CalculatorServer(self.clone())).with(HistoryServer(self))
    }
}

impl Calculator for Machine {
    fn add(&self, _context: &Context<'_>, request: Operands) -> Result<Number, Status> {
        Ok(self.result(request.a + request.b))
    }

    fn divide(&self, _context: &Context<'_>, request: Operands) -> Result<Number, Status> {
        if request.b == 0.0 {
            return Err(Status::new(Code::InvalidArgument, "division by zero"));
        }
        Ok(self.result(request.a / request.b))
    }

    fn sum(&self, _context: &Context<'_>, request: Numbers) -> Result<Number, Status> {
        Ok(self.result(request.values.iter().sum()))
    }
}

impl History for Machine {
    fn count(&self, _context: &Context<'_>, _request: Nothing) -> Result<Number, Status> {
        Ok(Number { value: self.results.load(Ordering::Relaxed) as f64 })
    }
}
