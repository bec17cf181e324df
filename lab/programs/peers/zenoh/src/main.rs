//! zenoh: queries between two peers over a Unix socket, requests and replies in buffers of its
//! shared memory.

use std::path::Path;
use std::time::{Duration, Instant};

use tombolo_bench::peer::{self, Caller, Variant};
use tombolo_bench::{Fallible, ended, ready};
use zenoh::handlers::FifoChannelHandler;
use zenoh::query::Reply;
use zenoh::shm::{BlockOn, GarbageCollect, PosixShmProviderBackend, ShmProvider, ShmProviderBuilder, ZShmMut};
use zenoh::{Config, Session, Wait};

const KEY: &str = "tombolo/bench/echo";
const MEMORY_BYTES: usize = 16 << 20;
/// How long two peers may take to find each other.
const PATIENCE: Duration = Duration::from_secs(5);

fn session(listens: Option<&Path>, connects: Option<&Path>) -> Fallible<Session> {
    let at = |dir: Option<&Path>| {
        dir.map_or("[]".into(), |dir| format!("[\"unixsock-stream/{}\"]", dir.join("zenoh").display()))
    };
    let mut config = Config::default();
    for (key, value) in [
        ("mode", "\"peer\"".to_string()),
        ("listen/endpoints", at(listens)),
        ("connect/endpoints", at(connects)),
        ("scouting/multicast/enabled", "false".into()),
        ("transport/shared_memory/enabled", "true".into()),
    ] {
        config.insert_json5(key, &value).map_err(|e| e.to_string())?;
    }
    zenoh::open(config).wait().map_err(|e| e.to_string().into())
}

type Provider = ShmProvider<PosixShmProviderBackend>;

fn provider() -> Fallible<Provider> {
    let backend = PosixShmProviderBackend::builder(MEMORY_BYTES).wait().map_err(|e| e.to_string())?;
    Ok(ShmProviderBuilder::backend(backend).wait())
}

fn filled(provider: &Provider, bytes: &[u8]) -> Fallible<ZShmMut> {
    let taken = provider.alloc(bytes.len()).with_policy::<BlockOn<GarbageCollect>>().wait();
    let mut buffer = taken.map_err(|e| format!("{e:?}"))?;
    buffer.copy_from_slice(bytes);
    Ok(buffer)
}

fn serve(_: &str, dir: &Path) -> Fallible<()> {
    let session = session(Some(dir), None)?;
    let provider = provider()?;
    let queryable = session
        .declare_queryable(KEY)
        .callback(move |query| {
            let Some(payload) = query.payload() else { return };
            if let Ok(buffer) = filled(&provider, &payload.to_bytes()) {
                // A query without its reply is seen by the other end.
                let _ = query.reply(KEY, buffer).wait();
            }
        })
        .wait()
        .map_err(|e| e.to_string())?;
    ready();
    while !ended() {
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(queryable);
    session.close().wait().map_err(|e| e.to_string().into())
}

struct Connection {
    provider: Provider,
    session: Session,
}

fn connect(_: &str, dir: &Path) -> Fallible<Connection> {
    let mut connection = Connection { provider: provider()?, session: session(None, Some(dir))? };
    // The other's queryable is known when the first query is answered.
    let until = Instant::now() + PATIENCE;
    while connection.call(&[1], &mut [0]).is_err() {
        if Instant::now() > until {
            return Err("the two peers did not find each other".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(connection)
}

impl Connection {
    fn send(&self, bytes: &[u8]) -> Fallible<FifoChannelHandler<Reply>> {
        let buffer = filled(&self.provider, bytes)?;
        self.session.get(KEY).payload(buffer).wait().map_err(|e| e.to_string().into())
    }
}

fn receive(replies: &FifoChannelHandler<Reply>, into: Option<&mut [u8]>) -> Fallible<()> {
    let reply = replies.recv().map_err(|e| e.to_string())?;
    let sample = reply.result().map_err(|e| format!("{e:?}"))?;
    if sample.payload().as_shm().is_none() {
        return Err("the reply is not in shared memory".into());
    }
    if let Some(into) = into {
        into.copy_from_slice(&sample.payload().to_bytes());
    }
    Ok(())
}

impl Caller for Connection {
    fn call(&mut self, bytes: &[u8], into: &mut [u8]) -> Fallible<()> {
        receive(&self.send(bytes)?, Some(into))
    }

    fn sixteen(&mut self, bytes: &[u8], calls: usize) -> Fallible<()> {
        let mut under_way = std::collections::VecDeque::with_capacity(16);
        for _ in 0..calls {
            if under_way.len() == 16 {
                under_way.pop_front().map_or(Ok(()), |replies| receive(&replies, None))?;
            }
            under_way.push_back(self.send(bytes)?);
        }
        under_way.iter().try_for_each(|replies| receive(replies, None))
    }
}

fn main() -> Fallible<()> {
    peer::run(&[Variant { name: "zenoh", polls: false }], serve, connect)
}
