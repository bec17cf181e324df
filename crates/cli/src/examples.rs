//! Examples at the end of each command's `--help`, in its manual page and in docs/cli.md. A test
//! has the parser read each line, so that an example which does not work any more fails.
//!
//! Commands that explain more than examples can (captures, events, logs, …) have theirs beside
//! their flags.

/// A command, and its examples: the line, and what it is for where the line does not say it.
type Examples = (&'static str, &'static [(&'static str, &'static str)]);

const EXAMPLES: &[Examples] = &[
    (
        "",
        &[
            ("tombolo up -d --wait", "start ./tombolo.toml, and wait until its machines are up"),
            ("tombolo status", "see what runs"),
            ("tombolo cell console web", "type at a machine's console; Ctrl-] leaves"),
            ("tombolo down", "stop it and remove all that it created"),
        ],
    ),
    (
        "up",
        &[
            ("tombolo up", "in the foreground; Ctrl-C stops the fabric"),
            ("tombolo up -d --wait=120 examples/demo.toml", "in the background, once its machines are up"),
            ("tombolo up --replace -d", "a new daemon; the machines run on"),
            ("tombolo up -d --machine node-1 all.toml", "this machine's part of a file for several"),
        ],
    ),
    (
        "check",
        &[
            ("tombolo check", ""),
            ("tombolo check --machine node-1 all.toml", "also what the file needs of this machine"),
            ("tombolo check --json demo.toml | jq '.faults[] | [.line, .key, .expected]'", "for an editor or CI"),
        ],
    ),
    (
        "apply",
        &[
            ("tombolo apply --dry-run", "what would change"),
            ("tombolo apply", "change it"),
            ("tombolo apply --json demo.toml", ""),
        ],
    ),
    (
        "set",
        &[
            ("tombolo set network.lan.uplink=kernel", ""),
            ("tombolo set port.guest.rate.send=100M port.guest.guard=mac --dry-run", "what would change"),
            ("tombolo set 'cell.web.groups=[\"front\", \"public\"]'", "a value as in the file"),
        ],
    ),
    (
        "unset",
        &[("tombolo unset port.guest.rate", "the key's default again"), ("tombolo unset tap.host", "the member goes")],
    ),
    (
        "config",
        &[
            ("tombolo config", ""),
            ("tombolo config --changes", "what was changed since the file was read"),
            ("tombolo config > tombolo.toml", "keep what runs; comments of the old file are lost"),
        ],
    ),
    (
        "forward",
        &[
            ("tombolo forward add 127.0.0.1:8080 web:80", ""),
            ("tombolo forward ls", ""),
            ("tombolo forward rm 127.0.0.1:8080", ""),
        ],
    ),
    (
        "forward add",
        &[
            ("tombolo forward add 127.0.0.1:8080 web:80", ""),
            ("tombolo forward add '[::1]:5353' dns:53 --proto udp", ""),
        ],
    ),
    ("forward ls", &[("tombolo forward ls", ""), ("tombolo forward ls --json | jq -r '.forwards[].listen'", "")]),
    ("forward rm", &[("tombolo forward rm 127.0.0.1:8080", ""), ("tombolo forward rm '[::1]:5353' --proto udp", "")]),
    (
        "rule",
        &[
            ("tombolo rule add deny --from web --to db --protocol tcp --port 5432", ""),
            ("tombolo rule ls", ""),
            ("tombolo rule rm 1", ""),
        ],
    ),
    (
        "rule add",
        &[
            ("tombolo rule add deny --from web --to db --protocol tcp --port 5432", ""),
            ("tombolo rule add allow --from admins --at 1", "before all others"),
        ],
    ),
    ("rule rm", &[("tombolo rule rm 1", "")]),
    ("rule ls", &[("tombolo rule ls", ""), ("tombolo rule ls --json | jq length", "")]),
    ("down", &[("tombolo down", ""), ("tombolo down --fabric demo", "from any folder")]),
    (
        "status",
        &[
            ("tombolo status", ""),
            ("tombolo status --json | jq -r '.ports[] | select(.up | not) | .name'", "ports that are down"),
        ],
    ),
    (
        "top",
        &[("tombolo top -i 2", "every two seconds"), ("tombolo top --once --json", "one measurement, for scripts")],
    ),
    (
        "port",
        &[
            ("tombolo port ls", ""),
            ("tombolo port add guest --kind vhost-user", "a socket for a VMM of your own"),
            ("tombolo port del guest", ""),
        ],
    ),
    (
        "port add",
        &[
            ("tombolo port add guest --kind vhost-user --queues 2", "a socket for a VMM of your own"),
            ("tombolo port add host --kind tap --ip 10.87.0.9", "a tap of this host"),
            ("tombolo port add card --kind packet --device eth1 --network lan", "an interface joins the network"),
            (
                "tombolo port add span --kind vxlan --vni 42 --local 192.0.2.1 --remote 192.0.2.2",
                "the network goes on at another machine",
            ),
            ("tombolo port add --sections more.toml", "several at once"),
        ],
    ),
    (
        "port set",
        &[
            ("tombolo port set web --rate send=100M,receive=1G", ""),
            ("tombolo port set web --rate off", "no limit any more"),
        ],
    ),
    ("port del", &[("tombolo port del guest", "")]),
    ("port ls", &[("tombolo port ls", ""), ("tombolo port ls --json | jq '.ports[].counters.rx_drops'", "")]),
    ("port stats", &[("tombolo port stats web", ""), ("tombolo port stats web --json", "")]),
    ("table mac", &[("tombolo table mac --network lan", "")]),
    ("table neighbours", &[("tombolo table neighbours --json", "")]),
    (
        "cell",
        &[
            ("tombolo cell ls", ""),
            ("tombolo cell run httpd --name web2", ""),
            ("tombolo cell restart web db", ""),
            ("tombolo cell stop web2", ""),
        ],
    ),
    (
        "cell run",
        &[
            ("tombolo cell run httpd --name web2 --network lan --memory 64M", "an app of the project"),
            ("tombolo cell run ./my-cell --args 'budget=32'", "an image of your own"),
            ("tombolo cell run web", "a machine of the file that has ended"),
            ("tombolo cell run --sections more.toml", "machines of another file"),
        ],
    ),
    ("cell ls", &[("tombolo cell ls", ""), ("tombolo cell ls --json | jq -r '.machines[].name'", "")]),
    (
        "cell console",
        &[
            ("tombolo cell console web", "Ctrl-] leaves"),
            ("tombolo cell console web --log", "what it said so far"),
            ("echo 'ip addr' | tombolo cell console linux", "typed from a pipe"),
        ],
    ),
    ("cell stop", &[("tombolo cell stop web db", "")]),
    ("cell restart", &[("tombolo cell restart web db", "")]),
    (
        "bypass",
        &[
            ("tombolo bypass attach tap0 eth0", "traffic between them skips the kernel's forwarding"),
            ("tombolo bypass status", "which path frames took, and why"),
            ("tombolo bypass detach", "back to the kernel"),
        ],
    ),
    (
        "bypass attach",
        &[
            ("tombolo bypass attach tap0 tap1 eth0", ""),
            ("tombolo bypass attach veth0 veth1 --netns router --mode tcx", ""),
        ],
    ),
    ("bypass detach", &[("tombolo bypass detach tap0", ""), ("tombolo bypass detach", "all of them")]),
    ("bypass status", &[("tombolo bypass status", ""), ("tombolo bypass status --netns router --metrics", "")]),
    (
        "bypass trace",
        &[
            ("tombolo bypass trace --seconds 5", "the first frame of each flow and path"),
            ("tombolo bypass trace tap0 --all --count 20", ""),
        ],
    ),
    ("bypass flows", &[("tombolo bypass flows --seconds 5 --passed", "what takes the kernel's path, and why")]),
    (
        "bypass capture",
        &[
            ("tombolo bypass capture -w flow.pcapng --end 10.1.0.2:443 --seconds 10", ""),
            ("tombolo bypass capture tap0 --protocol icmp | tcpdump -n -r -", ""),
        ],
    ),
    ("service", &[("tombolo service ls", ""), ("tombolo service stats calc", ""), ("tombolo service watch calc", "")]),
    ("service ls", &[("tombolo service ls", ""), ("tombolo service ls --json", "")]),
    (
        "service stats",
        &[("tombolo service stats calc", ""), ("tombolo service stats calc --metrics", "Prometheus text")],
    ),
    ("service slow", &[("tombolo service slow calc", "")]),
    ("service watch", &[("tombolo service watch calc -i 5", ""), ("tombolo service watch calc --count 3 --json", "")]),
    (
        "service bridge",
        &[
            ("tombolo service bridge calls --as calc", "the service of a cell behind the link, as calc"),
            ("tombolo service bridge calls --no-service --to calculator", "calls of the cell go to calculator"),
            ("tombolo service bridge --tcp 127.0.0.1:7000 --as calc", "over TCP, without a link"),
        ],
    ),
    (
        "service keys",
        &[("tombolo service keys --keys keys node-1 node-2", "once; then copy each machine's files to it")],
    ),
    (
        "service export",
        &[
            (
                "tombolo service export calculator --listen 0.0.0.0:7000 --keys keys --machine node-1 --allow node-2",
                "node-2 may call it",
            ),
            ("tombolo service export calculator --listen 10.0.0.1:7000 --no-tls", "within a VPN of your own"),
        ],
    ),
    (
        "service import",
        &[
            (
                "tombolo service import calculator --from node-1=192.0.2.7:7000 --keys keys --machine node-2",
                "then: tombolo call calculator '6 * 7'",
            ),
            ("tombolo service import calculator --from 10.0.0.1:7000 --from 10.0.0.2:7000 --no-tls --pick sticky", ""),
        ],
    ),
    (
        "call",
        &[
            ("tombolo call calc '6 * 7' --deadline 5ms", ""),
            ("tombolo call calc '6 * 7' --deadline 50ms --wait 5s", "the service may come within 5 s"),
            ("tombolo call echo x --deadline 1ms --repeat 1000 --interval 1ms", "how often deadlines are met"),
        ],
    ),
    ("doctor", &[("tombolo doctor", ""), ("tombolo doctor --json", "")]),
    (
        "lab",
        &[
            ("tombolo lab ls", "the experiments that there are"),
            ("tombolo lab show budget", "what an experiment takes"),
        ],
    ),
    ("span", &[("tombolo span status", "which other machines are heard, and what they have")]),
    (
        "span status",
        &[
            ("tombolo span status --fabric demo", ""),
            ("tombolo span status --json | jq -r '.report.machines[] | select(.state != \"up\") | .name'", ""),
        ],
    ),
    (
        "span settings",
        &[
            (
                "tombolo span settings -f all.toml --machine node-1 > home.span.toml",
                "for tombolo-span --config home.span.toml",
            ),
            ("tombolo span settings --fabric demo-node-1", "with what `tombolo set` has changed"),
        ],
    ),
    ("version", &[("tombolo version", ""), ("tombolo version --json", "")]),
    (
        "completions",
        &[
            ("source <(tombolo completions bash)", "for this shell"),
            ("tombolo completions fish > ~/.config/fish/completions/tombolo.fish", "for good"),
        ],
    ),
];

/// The command with its examples behind the rest of the help.
pub(crate) fn add(command: clap::Command) -> clap::Command {
    EXAMPLES.iter().fold(command, |command, (path, lines)| {
        let words: Vec<_> = path.split(' ').filter(|word| !word.is_empty()).collect();
        at(command, &words, lines)
    })
}

fn at(command: clap::Command, path: &[&str], lines: &[(&str, &str)]) -> clap::Command {
    let [first, rest @ ..] = path else {
        let before = command.get_after_help().map(|text| format!("{text}\n\n")).unwrap_or_default();
        return command.after_help(format!("{before}{}", text(lines)));
    };
    command.mut_subcommand(first, |sub| at(sub, rest, lines))
}

/// The lines, with what they are for in a column.
fn text(lines: &[(&str, &str)]) -> String {
    let width = lines.iter().filter(|(_, about)| !about.is_empty()).map(|(line, _)| line.len()).max().unwrap_or(0);
    let line = |(line, about): &(&str, &str)| format!("  {line:width$}  {about}").trim_end().to_string();
    format!("Examples:\n{}", lines.iter().map(line).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    /// The words of a line, as a shell takes them apart; enough of it for examples.
    fn words(line: &str) -> Vec<String> {
        let (mut out, mut word, mut quote) = (vec![], None::<String>, None);
        for c in line.chars() {
            match (quote, c) {
                (Some(q), c) if c == q => quote = None,
                (None, '\'' | '"') => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                (None, ' ') => out.extend(word.take()),
                (_, c) => word.get_or_insert_default().push(c),
            }
        }
        assert_eq!(quote, None, "{line}");
        out.extend(word);
        out
    }

    /// What of a line is for the program: from its name on, up to what is for the shell or for the
    /// reader.
    fn call(line: &str) -> Vec<String> {
        let start = line.find("tombolo ").unwrap_or_else(|| panic!("no call of the program: {line}"));
        let all = words(line[start..].split("  ").next().unwrap_or_default());
        all.into_iter().take_while(|word| !["|", ">", "&&", ";"].contains(&word.as_str())).collect()
    }

    fn look(command: &clap::Command, path: &str, seen: &mut usize) {
        let after = command.get_after_help().map(|text| text.to_string()).unwrap_or_default();
        let (_, lines) = after.split_once("Examples:\n").unwrap_or_else(|| panic!("no examples: {path}"));
        for line in lines.lines().filter(|line| line.starts_with("  ")) {
            let mut call = call(line.trim_end_matches(')'));
            call.iter_mut().for_each(|word| *word = word.trim_end_matches(')').to_string());
            let parsed = crate::parse(call.iter().map(OsString::from));
            assert!(parsed.is_ok(), "{path}: {line}: {}", parsed.unwrap_err());
            *seen += 1;
        }
        for sub in command.get_subcommands().filter(|s| !s.is_hide_set() && s.get_name() != "help") {
            look(sub, format!("{path} {}", sub.get_name()).trim(), seen);
        }
    }

    #[test]
    fn every_command_has_examples_that_the_parser_takes() {
        let mut seen = 0;
        look(&crate::command(), "", &mut seen);
        assert!(seen > 80, "{seen}");
        assert_eq!(words("a 'b c' \"d'e\" ''"), ["a", "b c", "d'e", ""]);
    }

    #[test]
    fn each_line_has_its_meaning_in_one_column() {
        let text = super::text(&[("tombolo up", "one"), ("tombolo status", "two"), ("tombolo a-long-one --flag", "")]);
        assert_eq!(text, "Examples:\n  tombolo up      one\n  tombolo status  two\n  tombolo a-long-one --flag");
    }
}
