//! Echoes what it is sent, over TCP and UDP, on port 7 (RFC 862).
#![no_std]
#![no_main]

use tombolo_cell::{Net, TcpOptions, TcpStream};

tombolo_cell::app!(echo);

async fn echo(net: Net) {
    net.serve(7, TcpOptions::default(), |mut stream: TcpStream| async move {
        let mut bytes = [0; 2048];
        while let Ok(n @ 1..) = stream.read(&mut bytes).await {
            if stream.write_all(&bytes[..n]).await.is_err() {
                break;
            }
        }
    });
    let mut udp = net.udp(7).expect("nothing else uses port 7");
    let mut bytes = [0; 2048];
    loop {
        let (n, from) = udp.receive(&mut bytes).await;
        // Nobody to tell if the way back is gone.
        let _ = udp.send(&bytes[..n], from).await;
    }
}
