//! A stream whose writes fail when its client has read nothing for too long.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// See the module.
pub(super) struct Stalled {
    stream: TcpStream,
    time: Duration,
    /// Runs while the client does not read.
    limit: Option<Pin<Box<Sleep>>>,
}

impl Stalled {
    pub(super) fn new(stream: TcpStream, time: Duration) -> Stalled {
        Stalled { stream, time, limit: None }
    }
}

impl AsyncRead for Stalled {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stalled {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        if written.is_ready() {
            self.limit = None;
            return written;
        }
        let time = self.time;
        let limit = self.limit.get_or_insert_with(|| Box::pin(tokio::time::sleep(time)));
        ready!(limit.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_client_that_reads_nothing_loses_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut stream = Stalled::new(listener.accept().await.unwrap().0, Duration::from_millis(50));
        let endless = async {
            loop {
                if let Err(error) = stream.write_all(&[0; 1 << 16]).await {
                    return error.kind();
                }
            }
        };
        let end = tokio::time::timeout(Duration::from_secs(30), endless).await;
        assert_eq!(end, Ok(io::ErrorKind::TimedOut));
    }
}
