//! `tombolo web`: the page that shows a fabric in a browser.

use std::io::{self, BufRead, IsTerminal};
use std::net::Ipv4Addr;

use clap::Args;
use tombolo_host::rundir;
use tombolo_host::web::Server;

use crate::exit::{Exit, Failure};
use crate::out;
use crate::select::Select;

const EXAMPLES: &str = "\
The link works once and for ten minutes; Enter prints another. Anyone with a session may see all
of the fabric, type into its consoles and take captures. Ctrl-C ends all sessions; the fabric runs
on.

Examples:
  tombolo web                               the fabric of this folder
  tombolo web --fabric demo --port 8080     the same port each time";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Web {
    /// Port to listen on; 0 is one that is free
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// Loopback address to listen on [default: a random one, for this page alone]
    #[arg(long, value_name = "ADDRESS")]
    address: Option<Ipv4Addr>,
}

impl Web {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let client = select.client()?;
        // A fabric that does not run, or is another user's, is told of here and not in the browser.
        client.status()?;
        let root = rundir::runtime_root()?;
        let socket = rundir::api_socket(&root, client.fabric());
        let failed = |error: tombolo_host::web::WebError| Failure::failed(error.to_string());
        let server = Server::bind(client.fabric(), &socket, self.address, self.port).map_err(failed)?;
        let links = server.links();
        out::print(&format!("{}\n", links.fresh()?))?;
        if io::stdin().is_terminal() {
            out::tell!("open this link within ten minutes; Enter prints another, Ctrl-C ends");
        }
        // It ends with the process: nothing else ends a read from a terminal.
        let print = move || {
            for line in io::stdin().lock().lines() {
                let printed = line.and_then(|_| links.fresh()).map(|link| out::print(&format!("{link}\n")));
                if !matches!(printed, Ok(Ok(()))) {
                    return;
                }
            }
        };
        let refused = |error| Failure::failed(format!("no thread could be started that waits for Enter: {error}"));
        std::thread::Builder::new().spawn(print).map_err(refused)?;
        server.run().map_err(failed)?;
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        web: Web,
    }

    #[test]
    fn a_place_may_be_named() {
        let web = Line::try_parse_from(["web", "--address", "127.1.1.1", "--port", "8080"]).unwrap().web;
        assert_eq!((web.port, web.address), (8080, Some(Ipv4Addr::new(127, 1, 1, 1))));
        let web = Line::try_parse_from(["web"]).unwrap().web;
        assert_eq!((web.port, web.address), (0, None));
        for wrong in [["--port", "65536"], ["--address", "localhost"], ["--address", "::1"]] {
            assert!(Line::try_parse_from(["web"].into_iter().chain(wrong)).is_err());
        }
    }
}
