//! `tombolo forward` and `tombolo rule`: forwards and rules of a running fabric, which are lists in
//! its file.

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};
use tombolo_host::api::config::ConfigReport;
use tombolo_host::api::report::SCHEMA;
use tombolo_host::config;

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out;
use crate::section::Origin;
use crate::select::Select;
use crate::set::How;
use crate::status;

#[derive(Subcommand, Debug)]
pub(crate) enum Forward {
    /// Add a forward
    Add(AddForward),
    /// Remove a forward
    Rm(RemoveForward),
    /// List the forwards
    Ls(ListForwards),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Proto {
    /// TCP
    Tcp,
    /// UDP
    Udp,
}

impl Proto {
    fn word(self) -> &'static str {
        match self {
            Proto::Tcp => "tcp",
            Proto::Udp => "udp",
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct AddForward {
    /// Where the host listens, such as 127.0.0.1:8080; an IPv6 address stands in brackets
    #[arg(value_name = "ADDRESS:PORT")]
    listen: String,
    /// The member that it leads to, by name or address, and its port, such as web:80
    #[arg(value_name = "MEMBER:PORT")]
    to: String,
    /// Transport
    #[arg(long, value_enum, default_value = "tcp")]
    proto: Proto,
    /// Network of the member [default: its only one]
    #[arg(long)]
    network: Option<String>,
    #[command(flatten)]
    how: How,
}

#[derive(Args, Debug)]
pub(crate) struct RemoveForward {
    /// Where the host listens, as `tombolo status` shows it
    #[arg(value_name = "ADDRESS:PORT")]
    listen: String,
    /// Transport
    #[arg(long, value_enum, default_value = "tcp")]
    proto: Proto,
    #[command(flatten)]
    how: How,
}

#[derive(Args, Debug)]
pub(crate) struct ListForwards {
    /// Print the forwards as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Rule {
    /// Add a rule; the first one that fits a connection decides
    Add(AddRule),
    /// Remove a rule
    Rm(RemoveRule),
    /// List the rules, with their numbers
    Ls(ListRules),
}

#[derive(Args, Debug)]
pub(crate) struct AddRule {
    /// What happens to the connections that it is about, such as allow or deny
    action: String,
    /// Who opens the connection: a member, a group or outside; repeat it for more [default:
    /// everybody]
    #[arg(long, value_name = "WHO")]
    from: Vec<String>,
    /// Who it is opened to; repeat it for more [default: everybody]
    #[arg(long, value_name = "WHO")]
    to: Vec<String>,
    /// tcp, udp, icmp or a number [default: every one]
    #[arg(long)]
    protocol: Option<String>,
    /// Port or range that the connection is opened to; repeat it for more [default: every port]
    #[arg(long, value_name = "PORT")]
    port: Vec<String>,
    /// Network that it is for [default: every one]
    #[arg(long)]
    network: Option<String>,
    /// Its number, from 1, by which it comes before others [default: the last]
    #[arg(long, value_name = "NUMBER", value_parser = number::place, allow_hyphen_values = true)]
    at: Option<usize>,
    #[command(flatten)]
    how: How,
}

#[derive(Args, Debug)]
pub(crate) struct RemoveRule {
    /// Number of the rule in `tombolo rule ls`, from 1
    #[arg(value_parser = number::place, allow_hyphen_values = true)]
    number: usize,
    #[command(flatten)]
    how: How,
}

#[derive(Args, Debug)]
pub(crate) struct ListRules {
    /// Print the rules as JSON
    #[arg(long)]
    json: bool,
}

/// A list of the configuration, such as its forwards.
fn list(running: &ConfigReport, word: &str) -> Vec<Value> {
    running.config.get(word).and_then(Value::as_array).cloned().unwrap_or_default()
}

/// Keys of a rule and of a forward, and what stands for them in the usage where that is not the
/// flag of their name.
const OF_RULES: [(&str, &str); 2] = [("action", "ACTION"), ("ports", "--port")];
const OF_FORWARDS: [(&str, &str); 2] = [("listen", "ADDRESS:PORT"), ("to", "MEMBER:PORT")];

/// Changes a list of the configuration that runs; refused if another change comes between. `edit`
/// gives the index of what it adds.
fn change(
    select: &Select,
    how: &How,
    word: &str,
    edit: impl FnOnce(&mut Vec<Value>) -> Result<Option<usize>, Failure>,
) -> Result<Exit, Failure> {
    let running = select.client()?.config()?;
    let mut all = list(&running, word);
    let entry = edit(&mut all)?.map_or_else(|| word.to_string(), |added| format!("{word}[{added}]"));
    // A file without any has no such key.
    let all = if all.is_empty() { Value::Null } else { Value::Array(all) };
    let origin = Origin::Entry(&entry, if word == "rule" { &OF_RULES } else { &OF_FORWARDS });
    how.change(select, &json!({ word: all }), Some(running.revision), Some(origin))
}

/// A number where it is one: the file tells texts from numbers.
fn number_or_text(text: &str) -> Value {
    text.parse::<u16>().map_or_else(|_| text.into(), Value::from)
}

fn one_or_list(words: &[String], value: impl Fn(&str) -> Value) -> Value {
    match words {
        [one] => value(one),
        all => all.iter().map(|word| value(word)).collect(),
    }
}

impl AddForward {
    fn section(&self) -> Value {
        let mut section = Map::new();
        if self.proto == Proto::Udp {
            section.insert("proto".into(), self.proto.word().into());
        }
        section.insert("listen".into(), self.listen.clone().into());
        section.insert("to".into(), self.to.clone().into());
        section.extend(self.network.iter().map(|network| ("network".to_string(), network.clone().into())));
        section.into()
    }
}

impl RemoveForward {
    /// Takes the forward out of all.
    fn edit(&self, all: &mut Vec<Value>) -> Result<Option<usize>, Failure> {
        let of = |forward: &Value| {
            let proto = forward.get("proto").and_then(Value::as_str).unwrap_or("tcp");
            Some(format!("{proto} {}", forward.get("listen")?.as_str()?))
        };
        let asked = format!("{} {}", self.proto.word(), self.listen);
        let before = all.len();
        let known: Vec<_> = all.iter().filter_map(of).collect();
        all.retain(|forward| of(forward).as_deref() != Some(&asked));
        if all.len() < before {
            return Ok(None);
        }
        let known = if known.is_empty() { "it has none".into() } else { format!("there are {}", known.join(", ")) };
        Err(Failure::failed(format!("the fabric has no {} forward from {}; {known}", self.proto.word(), self.listen)))
    }
}

impl Forward {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        match self {
            Forward::Add(add) => change(select, &add.how, "forward", |all| {
                all.push(add.section());
                Ok(Some(all.len() - 1))
            }),
            Forward::Rm(remove) => change(select, &remove.how, "forward", |all| remove.edit(all)),
            Forward::Ls(ls) => {
                let forwards = select.client()?.status()?.forwards;
                if ls.json {
                    out::json(&json!({ "schema": SCHEMA, "forwards": forwards }))?;
                } else {
                    out::print(&status::forwards(&forwards).render(out::colour()))?;
                }
                Ok(Exit::Done)
            }
        }
    }
}

impl AddRule {
    fn section(&self) -> Value {
        let mut section = Map::new();
        section.insert("action".into(), self.action.clone().into());
        for (key, who) in [("from", &self.from), ("to", &self.to)] {
            if !who.is_empty() {
                section.insert(key.into(), one_or_list(who, |word| word.into()));
            }
        }
        section.extend(self.protocol.iter().map(|protocol| ("protocol".to_string(), number_or_text(protocol))));
        if !self.port.is_empty() {
            section.insert("ports".into(), one_or_list(&self.port, number_or_text));
        }
        section.extend(self.network.iter().map(|network| ("network".to_string(), network.clone().into())));
        section.into()
    }

    fn edit(&self, all: &mut Vec<Value>) -> Result<Option<usize>, Failure> {
        let at = self.at.unwrap_or(all.len() + 1);
        if !(1..=all.len() + 1).contains(&at) {
            return Err(Failure::misused(format!("--at: expected a number from 1 to {}, found {at}", all.len() + 1)));
        }
        all.insert(at - 1, self.section());
        Ok(Some(at - 1))
    }
}

impl RemoveRule {
    fn edit(&self, all: &mut Vec<Value>) -> Result<Option<usize>, Failure> {
        if !(1..=all.len()).contains(&self.number) {
            let text = format!("the fabric has {}, found the number {}", out::counted(all.len(), "rule"), self.number);
            return Err(Failure::failed(text));
        }
        all.remove(self.number - 1);
        Ok(None)
    }
}

impl Rule {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        match self {
            Rule::Add(add) => change(select, &add.how, "rule", |all| add.edit(all)),
            Rule::Rm(remove) => change(select, &remove.how, "rule", |all| remove.edit(all)),
            Rule::Ls(ls) => {
                let rules = list(&select.client()?.config()?, "rule");
                if ls.json {
                    out::json(&rules)?;
                } else {
                    let lines = (1..).zip(&rules).map(|(n, rule)| format!("{n}  {}\n", config::inline(rule)));
                    out::print(&lines.collect::<String>())?;
                }
                Ok(Exit::Done)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    enum Line {
        #[command(subcommand)]
        Forward(Forward),
        #[command(subcommand)]
        Rule(Rule),
    }

    fn parse(line: &str) -> Line {
        Line::try_parse_from(["tombolo"].into_iter().chain(line.split(' '))).unwrap()
    }

    #[test]
    fn flags_become_the_keys_of_a_forward_and_of_a_rule() {
        let Line::Forward(Forward::Add(add)) = parse("forward add 127.0.0.1:8080 web:80") else { panic!() };
        assert_eq!(add.section(), json!({"listen": "127.0.0.1:8080", "to": "web:80"}));
        let Line::Forward(Forward::Add(add)) = parse("forward add [::1]:53 dns:53 --proto udp --network lan") else {
            panic!()
        };
        assert_eq!(add.section(), json!({"proto": "udp", "listen": "[::1]:53", "to": "dns:53", "network": "lan"}));
        let Line::Rule(Rule::Add(add)) =
            parse("rule add deny --from a --from b --to db --protocol tcp --port 80 --port 6000-6010 --network lan")
        else {
            panic!()
        };
        let expected = json!({
            "action": "deny", "from": ["a", "b"], "to": "db", "protocol": "tcp", "ports": [80, "6000-6010"], "network": "lan"
        });
        assert_eq!(add.section(), expected);
        let Line::Rule(Rule::Add(add)) = parse("rule add allow --protocol 47") else { panic!() };
        assert_eq!(add.section(), json!({"action": "allow", "protocol": 47}));
    }

    #[test]
    fn one_forward_or_rule_is_taken_out_and_what_is_not_there_is_told() {
        let mut forwards = vec![
            json!({"listen": "127.0.0.1:8080", "to": "web:80"}),
            json!({"listen": "127.0.0.1:8080", "to": "web:80", "proto": "udp"}),
        ];
        let Line::Forward(Forward::Rm(remove)) = parse("forward rm 127.0.0.1:8080 --proto udp") else { panic!() };
        remove.edit(&mut forwards).unwrap();
        assert_eq!(forwards, [json!({"listen": "127.0.0.1:8080", "to": "web:80"})]);
        let Err(Failure::Said(_, text)) = remove.edit(&mut forwards) else { panic!() };
        assert!(text.contains("no udp forward from 127.0.0.1:8080; there are tcp 127.0.0.1:8080"), "{text}");
        let mut rules = vec![json!({"action": "allow"})];
        let Line::Rule(Rule::Add(add)) = parse("rule add deny --at 1") else { panic!() };
        add.edit(&mut rules).unwrap();
        assert_eq!(rules, [json!({"action": "deny"}), json!({"action": "allow"})]);
        let Line::Rule(Rule::Rm(remove)) = parse("rule rm 2") else { panic!() };
        remove.edit(&mut rules).unwrap();
        assert_eq!(rules, [json!({"action": "deny"})]);
        assert!(remove.edit(&mut rules).is_err());
        let Line::Rule(Rule::Add(add)) = parse("rule add deny --at 3") else { panic!() };
        assert!(add.edit(&mut rules).is_err());
    }
}
