//! Cap'n Proto's own RPC over a Unix socket, two-party, each end on one thread.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use capnp_rpc::rpc_twoparty_capnp::Side;
use capnp_rpc::{RpcSystem, twoparty};
use futures::future::try_join_all;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::task::LocalSet;
use tokio_util::compat::{TokioAsyncReadCompatExt, TokioAsyncWriteCompatExt};
use tombolo_bench::peer::{self, Caller, Variant};
use tombolo_bench::{Fallible, ended, ready};

#[allow(clippy::all, unreachable_pub, missing_docs)]
mod echo_capnp {
    include!(concat!(env!("OUT_DIR"), "/echo_capnp.rs"));
}
use echo_capnp::echo;

struct Echo;

impl echo::Server for Echo {
    async fn echo(self: Rc<Self>, params: echo::EchoParams, mut results: echo::EchoResults) -> Result<(), capnp::Error> {
        results.get().set_bytes(params.get()?.get_bytes()?);
        Ok(())
    }
}

fn network(socket: UnixStream, side: Side) -> Box<twoparty::VatNetwork<impl futures::AsyncRead + Unpin>> {
    let (reader, writer) = socket.into_split();
    let options = capnp::message::ReaderOptions::default();
    Box::new(twoparty::VatNetwork::new(reader.compat(), writer.compat_write(), side, options))
}

fn runtime() -> Fallible<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn serve(_: &str, dir: &Path) -> Fallible<()> {
    let runtime = runtime()?;
    LocalSet::new().block_on(&runtime, async {
        let listener = UnixListener::bind(dir.join("capnp"))?;
        ready();
        let (socket, _) = listener.accept().await?;
        let echo: echo::Client = capnp_rpc::new_client(Echo);
        tokio::task::spawn_local(RpcSystem::new(network(socket, Side::Server), Some(echo.client)));
        while !ended() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    })
}

struct Connection {
    echo: echo::Client,
    tasks: LocalSet,
    runtime: Runtime,
}

fn connect(_: &str, dir: &Path) -> Fallible<Connection> {
    let runtime = runtime()?;
    let tasks = LocalSet::new();
    let echo = tasks.block_on(&runtime, async {
        let socket = UnixStream::connect(dir.join("capnp")).await?;
        let mut system = RpcSystem::new(network(socket, Side::Client), None);
        let echo: echo::Client = system.bootstrap(Side::Server);
        tokio::task::spawn_local(system);
        Fallible::Ok(echo)
    })?;
    Ok(Connection { echo, tasks, runtime })
}

impl Caller for Connection {
    fn call(&mut self, bytes: &[u8], into: &mut [u8]) -> Fallible<()> {
        self.tasks.block_on(&self.runtime, async {
            let mut request = self.echo.echo_request();
            request.get().set_bytes(bytes);
            let response = request.send().promise.await?;
            into.copy_from_slice(response.get()?.get_bytes()?);
            Ok(())
        })
    }

    fn sixteen(&mut self, bytes: &[u8], calls: usize) -> Fallible<()> {
        let one = || async {
            for _ in 0..calls / 16 {
                let mut request = self.echo.echo_request();
                request.get().set_bytes(bytes);
                request.send().promise.await?;
            }
            Fallible::Ok(())
        };
        self.tasks.block_on(&self.runtime, try_join_all((0..16).map(|_| one())))?;
        Ok(())
    }
}

fn main() -> Fallible<()> {
    peer::run(&[Variant { name: "capnp", polls: false }], serve, connect)
}
