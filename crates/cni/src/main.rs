//! The CNI plugin of Tombolo: puts a container on a network of a running fabric.
//!
//! A container runtime starts it once per command, with the command in the environment and the
//! network configuration on standard input (CNI 0.3.1 to 1.1.0). The container gets a tap of the
//! fabric's switch directly in its namespace, without a veth pair, so offloads are kept
//! (docs/kubernetes.md). [`request`] checks what comes in, [`attach`] carries it out, [`fabric`]
//! talks to the daemon, [`caller`] tells whether the runtime is still there, [`dan`] writes the
//! files that Kata reads, [`error`] has the codes. Nothing is kept between two calls: what is
//! needed is in the fabric and follows from the container's ID. So calls for different attachments
//! run in parallel.
#![forbid(unsafe_code)]

mod attach;
mod caller;
mod dan;
mod error;
mod fabric;
mod request;

use std::io::{Read, Write};
use std::process::ExitCode;

use caller::Caller;
use request::{Command, Environment, MAX_INPUT_BYTES};
use serde_json::Value;

fn answer(environment: &Environment, input: &[u8], caller: &Caller) -> Result<Option<Value>, error::CniError> {
    let command = Command::parse(environment.command.as_deref())?;
    if command == Command::Version {
        return Ok(Some(attach::versions(&request::version_of(input))));
    }
    match request::parse(command, input) {
        // What makes ADD fail must not make DEL fail too: the runtime could not tear down the
        // sandbox.
        Err(error) if command == Command::Del && request::is_object(input) => {
            attach::note_nothing_added(&error);
            Ok(None)
        }
        config => attach::run(command, environment, &config?, caller),
    }
}

fn main() -> ExitCode {
    let caller = Caller::now();
    let environment = Environment::of_process();
    if environment.command.is_none() && std::env::args_os().len() > 1 {
        println!(
            "tombolo-cni {}: a CNI plugin; a container runtime starts it, see docs/kubernetes.md",
            env!("CARGO_PKG_VERSION")
        );
        return ExitCode::SUCCESS;
    }
    let mut input = Vec::new();
    let read = std::io::stdin().lock().take(MAX_INPUT_BYTES + 1).read_to_end(&mut input);
    let result = match read {
        Ok(_) => answer(&environment, &input, &caller),
        Err(error) => Err(error::CniError::Decode(error.to_string())),
    };
    let (text, code) = match result {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(value)) => (value.to_string(), ExitCode::SUCCESS),
        Err(error) => (error.object(&request::version_of(&input)).to_string(), ExitCode::FAILURE),
    };
    // A runtime that does not read has ended.
    let _ = writeln!(std::io::stdout(), "{text}");
    code
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn environment(command: &str) -> Environment {
        Environment {
            command: Some(command.into()),
            container: Some("c1".into()),
            netns: Some("/nonexistent/netns".into()),
            interface: Some("eth0".into()),
            args: None,
        }
    }

    fn input(more: &Value) -> Vec<u8> {
        let mut all = json!({ "cniVersion": "1.1.0", "name": "pods", "fabric": "demo", "runtime": "/nonexistent", "cni.dev/valid-attachments": [] });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all.to_string().into_bytes()
    }

    /// What ADD refuses for `code`, DEL carries out. GC and STATUS get as far as the daemon, which
    /// is not there.
    #[test]
    fn what_add_refuses_does_not_keep_a_sandbox_from_its_end() {
        let mapping = |more: Value| {
            let mut one = json!({ "hostPort": 80, "containerPort": 80 });
            one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ "runtimeConfig": { "portMappings": [one] } })
        };
        let many: Vec<Value> = (1..=257).map(|n| json!({ "hostPort": n, "containerPort": n })).collect();
        let wishes = [
            (mapping(json!({ "protocol": "sctp" })), 7),
            (mapping(json!({ "hostPort": 0 })), 7),
            (mapping(json!({ "hostPort": -1 })), 6),
            (mapping(json!({ "hostIP": "host" })), 7),
            (json!({ "runtimeConfig": { "portMappings": many } }), 7),
            (json!({ "runtimeConfig": { "bandwidth": { "ingressRate": 500 } } }), 7),
            (json!({ "runtimeConfig": { "bandwidth": { "egressRate": "fast" } } }), 6),
            (json!({ "runtimeConfig": { "mac": "02:00:00:00:00:01" } }), 2),
            (json!({ "runtimeConfig": { "ips": ["10.0.0.x"] } }), 7),
            (json!({ "runtimeConfig": { "ips": ["10.0.0.1", "10.0.0.2"] } }), 7),
            (json!({ "runtimeConfig": 7 }), 6),
            (json!({ "defaultRoute": "yes" }), 6),
        ];
        let code = |command: &str, input: &[u8]| {
            answer(&environment(command), input, &Caller::now()).err().map(|error| error.code())
        };
        for (more, refused) in wishes {
            let input = input(&more);
            assert_eq!(code("ADD", &input), Some(refused), "{more}");
            assert_eq!(code("CHECK", &input), Some(refused), "{more}");
            assert_eq!(code("DEL", &input), None, "{more}");
            assert_eq!((code("GC", &input), code("STATUS", &input)), (Some(11), Some(50)), "{more}");
        }
        // Without a right place there is nothing that GC and STATUS could look at; DEL has nothing
        // to remove.
        for (more, refused) in [
            (json!({ "cniVersion": "9.0.0" }), 1),
            (json!({ "name": "a b" }), 7),
            (json!({ "fabric": "A" }), 7),
            (json!({ "fabric": 7 }), 6),
            (json!({ "runtime": "run" }), 7),
            (json!({ "vm": "kata" }), 7),
            (json!({ "dan": "/run/dans" }), 7),
        ] {
            let input = input(&more);
            let all = ["ADD", "CHECK", "GC", "STATUS"].map(|command| code(command, &input));
            assert_eq!((all, code("DEL", &input)), ([Some(refused); 4], None), "{more}");
        }
        assert_eq!(
            (code("ADD", &input(&json!({ "network": "A" }))), code("DEL", &input(&json!({ "network": "A" })))),
            (Some(7), None)
        );
        // So it is for the environment. What the specification demands is demanded.
        let with = |change: &dyn Fn(&mut Environment)| {
            ["ADD", "DEL"].map(|command| {
                let mut environment = environment(command);
                change(&mut environment);
                answer(&environment, &input(&json!({})), &Caller::now()).err().map(|error| error.code())
            })
        };
        let long = "x".repeat(200);
        assert_eq!(with(&|e| e.container = Some(long.clone())), [Some(4), None]);
        assert_eq!(with(&|e| e.interface = Some("much-too-long-a-name".into())), [Some(4), None]);
        assert_eq!(with(&|e| e.netns = Some("/a\nb".into())), [Some(4), None]);
        assert_eq!(with(&|e| e.args = Some("MAC=02:00:00:00:00:01".into())), [Some(2), None]);
        assert_eq!(with(&|e| e.args = Some("IP=x".into())), [Some(7), None]);
        assert_eq!(with(&|e| e.container = None), [Some(4); 2]);
        assert_eq!(with(&|e| e.interface = Some(String::new())), [Some(4); 2]);
        for bytes in [&b"{"[..], b"[]", b""] {
            assert_eq!([code("ADD", bytes), code("DEL", bytes)], [Some(6); 2]);
        }
    }
}
