//! Echoes what it is sent, over TCP and UDP, on port 7 (RFC 862), and what is typed at its console,
//! where that has an input.
#![no_std]
#![no_main]

use tombolo_cell::{Net, TcpOptions, TcpStream, console};

tombolo_cell::app!(echo);

/// Bytes that are no UTF-8 come back as replacement characters.
async fn echo_console(net: Net) {
    let mut bytes = [0; 256];
    while let Some(n) = net.read_console(&mut bytes).await {
        for chunk in bytes[..n].utf8_chunks() {
            let rest = if chunk.invalid().is_empty() { "" } else { "\u{fffd}" };
            console::print(format_args!("{}{rest}", chunk.valid()));
        }
    }
}

async fn echo(net: Net) {
    net.spawn(echo_console(net.clone()));
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
        // If the way back is gone, the error cannot be reported.
        let _ = udp.send(&bytes[..n], from).await;
    }
}
