//! gRPC by tonic: unary calls over a Unix socket, each end on a runtime of one thread, windows
//! large enough that none waits for them.

use std::path::Path;
use std::time::Duration;

use futures::future::try_join_all;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tombolo_bench::peer::{self, Caller, Variant};
use tombolo_bench::{Fallible, ended, ready};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

#[allow(clippy::all, unreachable_pub)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/bench.Echo.rs"));
}
use generated::echo_client::EchoClient;
use generated::echo_server::{Echo, EchoServer};

/// Flow control's windows.
const WINDOW: u32 = 64 << 20;

#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    #[prost(bytes = "vec", tag = "1")]
    bytes: Vec<u8>,
}

struct Service;

#[tonic::async_trait]
impl Echo for Service {
    async fn echo(&self, request: Request<Message>) -> Result<Response<Message>, Status> {
        Ok(Response::new(request.into_inner()))
    }
}

fn runtime() -> Fallible<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn serve(_: &str, dir: &Path) -> Fallible<()> {
    runtime()?.block_on(async {
        let listener = UnixListener::bind(dir.join("grpc"))?;
        ready();
        let server = Server::builder()
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .add_service(EchoServer::new(Service));
        let over = async {
            while !ended() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        Ok(server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), over).await?)
    })
}

struct Connection {
    client: EchoClient<Channel>,
    runtime: Runtime,
}

fn connect(_: &str, dir: &Path) -> Fallible<Connection> {
    let runtime = runtime()?;
    let client = runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("unix:{}", dir.join("grpc").display()))?
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        Fallible::Ok(EchoClient::new(endpoint.connect().await?))
    })?;
    Ok(Connection { client, runtime })
}

impl Caller for Connection {
    fn call(&mut self, bytes: &[u8], into: &mut [u8]) -> Fallible<()> {
        let reply = self.runtime.block_on(self.client.echo(Message { bytes: bytes.into() }))?;
        into.copy_from_slice(&reply.into_inner().bytes);
        Ok(())
    }

    fn sixteen(&mut self, bytes: &[u8], calls: usize) -> Fallible<()> {
        let one = |mut client: EchoClient<Channel>| async move {
            for _ in 0..calls / 16 {
                client.echo(Message { bytes: bytes.into() }).await?;
            }
            Fallible::Ok(())
        };
        self.runtime.block_on(try_join_all((0..16).map(|_| one(self.client.clone()))))?;
        Ok(())
    }
}

fn main() -> Fallible<()> {
    peer::run(&[Variant { name: "tonic", polls: false }], serve, connect)
}
