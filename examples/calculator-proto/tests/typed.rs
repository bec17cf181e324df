//! Typed calls end to end: a service and its clients over shared memory.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::time::Duration;

use calculator_proto::Machine;
use calculator_proto::known::{Calendar, CalendarClient, CalendarServer, Event};
use calculator_proto::proto::{
    Calculator, CalculatorClient, CalculatorServer, HistoryClient, Nothing, Number, Numbers, Operands,
};
use tombolo_rpc_proto::prost::Message;
use tombolo_rpc_proto::prost_types::value::Kind;
use tombolo_rpc_proto::prost_types::{Any, Duration as ProtoDuration, FieldMask, Struct, Timestamp, Value};
use tombolo_rpc_proto::tombolo_rpc::client::{CallError, CallOptions, Client, ConnectOptions};
use tombolo_rpc_proto::tombolo_rpc::deadline::Deadline;
use tombolo_rpc_proto::tombolo_rpc::provider::{Handler, Options, Service};
use tombolo_rpc_proto::{Code, Context, Error, Router, Status};

const TIMEOUT: Duration = Duration::from_secs(20);

fn serve(dir: &Path, handler: impl Handler) -> Service {
    Service::register("c", Options { folder: Some(dir.into()), ..Options::default() }, handler).unwrap()
}

fn connect(dir: &Path) -> Client {
    Client::connect_with("c", &ConnectOptions { folder: Some(dir.into()), ..ConnectOptions::default() }).unwrap()
}

fn any() -> CallOptions {
    CallOptions::default()
}

const SIX_SEVEN: Operands = Operands { a: 6.0, b: 7.0 };

#[test]
fn methods_of_two_services_are_called_under_one_name() {
    let dir = tempfile::tempdir().unwrap();
    let _service = serve(dir.path(), Machine::default().router());
    let client = CalculatorClient::new(connect(dir.path()));
    assert_eq!(client.add(&SIX_SEVEN, &CallOptions::within(TIMEOUT)).unwrap().value, 13.0);
    assert_eq!(client.divide(&SIX_SEVEN, &any()).unwrap().value, 6.0 / 7.0);
    // Larger than what an entry holds: the arena carries it.
    let many = Numbers { values: (0..10_000).map(f64::from).collect() };
    assert_eq!(client.sum(&many, &any()).unwrap().value, 49_995_000.0);
    assert_eq!(HistoryClient::new(client.client().clone()).count(&Nothing {}, &any()).unwrap().value, 3.0);
}

#[test]
fn tokens_and_futures_bring_messages_too() {
    let dir = tempfile::tempdir().unwrap();
    let _service = serve(dir.path(), Machine::default().router());
    let client = CalculatorClient::new(connect(dir.path()));
    let pending = client.submit_add(&SIX_SEVEN, &any()).unwrap();
    let other = client.submit_divide(&Operands { a: 1.0, b: 0.0 }, &any()).unwrap();
    assert!(client.client().wait_any(&[other.token()], TIMEOUT).is_some());
    assert_eq!(other.poll().unwrap().unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(pending.wait(TIMEOUT).unwrap().value, 13.0);

    struct Doorbell(mpsc::Sender<()>);
    impl Wake for Doorbell {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(());
        }
    }
    let (ring, rung) = mpsc::channel();
    let waker = Waker::from(Arc::new(Doorbell(ring)));
    let mut call = pin!(client.add_async(&SIX_SEVEN, &any()));
    let value = loop {
        if let Poll::Ready(done) = call.as_mut().poll(&mut Task::from_waker(&waker)) {
            break done.unwrap().value;
        }
        rung.recv_timeout(TIMEOUT).unwrap();
    };
    assert_eq!(value, 13.0);
}

#[test]
fn a_status_crosses_with_its_words() {
    let dir = tempfile::tempdir().unwrap();
    let _service = serve(dir.path(), Machine::default().router());
    let client = CalculatorClient::new(connect(dir.path()));
    let error = client.divide(&Operands { a: 1.0, b: 0.0 }, &any()).unwrap_err();
    assert!(matches!(&error, Error::Status(status) if status.message() == "division by zero"), "{error}");
    assert_eq!(error.code(), Code::InvalidArgument);
}

/// A raw request's code and text.
fn raw(client: &Client, bytes: &[u8]) -> (Code, String) {
    let reply = client.call(bytes, &any()).unwrap();
    (Code::from_number(reply.code()), String::from_utf8(reply.to_vec().unwrap()).unwrap())
}

fn request(method: &str, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![1, 0];
    bytes.extend((method.len() as u16).to_le_bytes());
    bytes.extend(method.as_bytes());
    bytes.extend(message);
    bytes
}

#[test]
fn what_cannot_be_called_is_told_apart_and_calls_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let _service = serve(dir.path(), Machine::default().router());
    let client = connect(dir.path());
    let cases: [(&[u8], Code, &str); 6] = [
        (&request("calculator.Calculator/Multiply", &[]), Code::Unimplemented, "no method \"Multiply\" here"),
        (&request("calculator.Abacus/Add", &[]), Code::Unimplemented, "no service \"calculator.Abacus\" here"),
        (&request("calculator.Calculator/Add", b"\x09\x01"), Code::InvalidArgument, "the message cannot be decoded"),
        (&request("nowhere", &[]), Code::InvalidArgument, "has no service"),
        (b"6 * 7", Code::InvalidArgument, "version 54.32, expected 1.0"),
        (b"", Code::InvalidArgument, "shorter than its head"),
    ];
    for (bytes, code, words) in cases {
        let (got, text) = raw(&client, bytes);
        assert!(got == code && text.contains(words), "{bytes:?}: {got:?} {text:?}");
    }
    // By hand as the generated client does it.
    let reply = client.call(&request("calculator.Calculator/Add", &SIX_SEVEN.encode_to_vec()), &any()).unwrap();
    assert_eq!(Number::decode(&*reply.to_vec().unwrap()).unwrap().value, 13.0);
    let history = HistoryClient::new(client);
    assert_eq!(history.count(&Nothing {}, &any()).unwrap().value, 1.0, "only that was calculated");
}

#[test]
fn no_altered_byte_breaks_the_service() {
    let dir = tempfile::tempdir().unwrap();
    let service = serve(dir.path(), Machine::default().router());
    let client = connect(dir.path());
    let right = request("calculator.Calculator/Sum", &Numbers { values: vec![1.0, 2.0] }.encode_to_vec());
    for at in 0..right.len() {
        for value in [0, 1, 0x0a, 0x7f, 0x80, 0xff] {
            let mut bytes = right.clone();
            bytes[at] = value;
            let reply = client.call(&bytes, &any()).unwrap();
            let code = Code::from_number(reply.code());
            let expected = [Code::Ok, Code::InvalidArgument, Code::Unimplemented];
            assert!(expected.contains(&code), "{value:#x} at {at}: {code:?}");
        }
    }
    assert_eq!(service.report().answers.failed, 0);
}

/// Answers as its next instruction says.
struct Instructed {
    orders: Mutex<mpsc::Receiver<Order>>,
    begun: mpsc::Sender<()>,
}

enum Order {
    Answer,
    Panic,
    Status(Code),
}

impl Calculator for Instructed {
    fn add(&self, context: &Context<'_>, _request: Operands) -> Result<Number, Status> {
        self.begun.send(()).unwrap();
        match self.orders.lock().unwrap_or_else(|e| e.into_inner()).recv_timeout(TIMEOUT).unwrap() {
            Order::Answer => Ok(Number { value: context.left_ns().map_or(-1.0, |left| left as f64) }),
            Order::Panic => std::panic::resume_unwind(Box::new("as meant")),
            Order::Status(code) => Err(Status::new(code, "as meant")),
        }
    }

    fn divide(&self, _context: &Context<'_>, _request: Operands) -> Result<Number, Status> {
        Err(Status::new(Code::Unimplemented, "not here"))
    }

    fn sum(&self, _context: &Context<'_>, _request: Numbers) -> Result<Number, Status> {
        Err(Status::new(Code::Unimplemented, "not here"))
    }
}

#[test]
fn each_end_of_a_call_has_a_code() {
    let dir = tempfile::tempdir().unwrap();
    let (order, orders) = mpsc::channel();
    let (begun, begins) = mpsc::channel();
    let handler = Router::new().with(CalculatorServer(Instructed { orders: Mutex::new(orders), begun }));
    let options = Options { folder: Some(dir.path().into()), queue_bound: 1, ..Options::default() };
    let service = Service::register("c", options, handler).unwrap();
    let client = CalculatorClient::new(connect(dir.path()));
    let code = |options: &CallOptions| client.add(&SIX_SEVEN, options).unwrap_err().code();

    order.send(Order::Answer).unwrap();
    let left = client.add(&SIX_SEVEN, &CallOptions::within(TIMEOUT)).unwrap().value;
    assert!(left > 0.0 && left <= TIMEOUT.as_nanos() as f64, "{left} ns left");
    order.send(Order::Panic).unwrap();
    assert_eq!(code(&any()), Code::Internal);
    for number in 1..17 {
        let expected = Code::from_number(number);
        order.send(Order::Status(expected)).unwrap();
        assert_eq!(code(&any()), expected);
    }
    assert_eq!(code(&CallOptions { deadline: Deadline::At(1), ..any() }), Code::DeadlineExceeded);

    while begins.try_recv().is_ok() {}
    let served = client.submit_add(&SIX_SEVEN, &any()).unwrap();
    begins.recv_timeout(TIMEOUT).unwrap();
    let expires = CallOptions { ttl: Some(Duration::from_millis(1)), ..any() };
    assert_eq!(code(&expires), Code::DeadlineExceeded);
    let queued = client.submit_add(&SIX_SEVEN, &any()).unwrap();
    assert_eq!(code(&any()), Code::ResourceExhausted, "the queue is full");
    assert!(queued.cancel());
    assert_eq!(queued.wait(TIMEOUT).unwrap_err().code(), Code::Cancelled);
    let impatient = CallOptions { timeout: Duration::from_millis(1), ..any() };
    assert_eq!(code(&impatient), Code::DeadlineExceeded);
    order.send(Order::Answer).unwrap();
    assert_eq!(served.wait(TIMEOUT).unwrap().value, -1.0);
    drop(service);
    let gone = client.add(&SIX_SEVEN, &any()).unwrap_err();
    assert!(matches!(gone, Error::Call(CallError::ProviderGone)), "{gone}");
    assert_eq!(gone.code(), Code::Unavailable);
}

#[test]
fn a_reply_that_is_no_message_is_an_error_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let handler = |request: &tombolo_rpc_proto::tombolo_rpc::provider::Request<'_>,
                   reply: &mut tombolo_rpc_proto::tombolo_rpc::provider::Reply<'_>| {
        assert!(!request.is_empty());
        reply.write(b"\x09\x01").unwrap();
    };
    let _service = serve(dir.path(), handler);
    let error = CalculatorClient::new(connect(dir.path())).add(&SIX_SEVEN, &any()).unwrap_err();
    assert!(matches!(error, Error::Undecodable(_)), "{error}");
    assert_eq!(error.code(), Code::DataLoss);
}

#[derive(Default)]
struct Events(Mutex<Vec<Event>>);

impl Events {
    fn last(&self) -> Result<Event, Status> {
        self.0.lock().unwrap().last().cloned().ok_or_else(|| Status::new(Code::NotFound, "no event"))
    }
}

impl Calendar for Events {
    fn put(&self, _: &Context<'_>, event: Event) -> Result<(), Status> {
        self.0.lock().unwrap().push(event);
        Ok(())
    }

    fn last(&self, _: &Context<'_>, (): ()) -> Result<Event, Status> {
        Events::last(self)
    }

    fn count(&self, _: &Context<'_>, (): ()) -> Result<u64, Status> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn end(&self, _: &Context<'_>, later: ProtoDuration) -> Result<Timestamp, Status> {
        let at = Events::last(self)?.at.unwrap_or_default();
        Ok(Timestamp { seconds: at.seconds + later.seconds, nanos: at.nanos + later.nanos })
    }
}

#[test]
fn messages_of_well_known_types_cross_with_no_dependency_more() {
    let dir = tempfile::tempdir().unwrap();
    let _service = serve(dir.path(), Router::new().with(CalendarServer(Events::default())));
    let client = CalendarClient::new(connect(dir.path()));
    assert_eq!(client.last(&(), &any()).unwrap_err().code(), Code::NotFound);
    let words = Value { kind: Some(Kind::StringValue("in the hall".into())) };
    let event = Event {
        at: Some(Timestamp { seconds: 1_800_000_000, nanos: 5 }),
        lasts: Some(ProtoDuration { seconds: 90, nanos: 0 }),
        note: Some("concert".into()),
        amount: None,
        details: Some(Struct { fields: BTreeMap::from([("where".to_string(), words)]) }),
        payload: Some(Any { type_url: "type.googleapis.com/x".into(), value: vec![1, 2, 3] }),
        fields: Some(FieldMask { paths: vec!["at".into()] }),
    };
    client.put(&event, &any()).unwrap();
    assert_eq!(client.last(&(), &any()).unwrap(), event);
    assert_eq!(client.count(&(), &any()).unwrap(), 1);
    let later = ProtoDuration { seconds: 10, nanos: 1 };
    assert_eq!(client.end(&later, &any()).unwrap(), Timestamp { seconds: 1_800_000_010, nanos: 6 });
}
