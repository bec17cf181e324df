//! Echoes what it is sent, over TCP and UDP, on port 7 (RFC 862).
#![no_std]
#![no_main]

use tombolo_cell::{Net, TcpOptions};

tombolo_cell::app!(echo);

async fn echo(net: Net) {
    let mut udp = net.udp(7).expect("nothing else uses port 7");
    net.spawn(async move {
        let mut bytes = [0; 2048];
        loop {
            let (n, from) = udp.receive(&mut bytes).await;
            let _ = udp.send(&bytes[..n], from).await;
        }
    });
    let mut listener = net.listen(7, TcpOptions::default());
    loop {
        let mut stream = listener.accept().await;
        net.spawn(async move {
            let mut bytes = [0; 2048];
            while let Ok(n @ 1..) = stream.read(&mut bytes).await
                && stream.write_all(&bytes[..n]).await.is_ok()
            {}
        });
    }
}
