//! `tombolo table`: which addresses are where.

use clap::{Args, Subcommand};
use tombolo_host::api::report::{SCHEMA, Tables};

use crate::exit::{Exit, Failure};
use crate::out::{self, Table as Grid, span};
use crate::select::Select;

const EXAMPLES: &str = "\
Examples:
  tombolo table mac --network lan
  tombolo table neighbours --json | jq -r '.neighbours[] | select(.name == \"web\") | .ip'";

#[derive(Subcommand, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) enum Table {
    /// Print the forwarding tables: to which port frames for a MAC address go
    Mac(Of),
    /// Print which IP addresses members have: leased, reserved, or IPv6 that they gave themselves
    #[command(visible_alias = "neighbors")]
    Neighbours(Of),
}

#[derive(Args, Debug)]
pub(crate) struct Of {
    /// Only of this network
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// Print both tables as JSON
    #[arg(long)]
    json: bool,
}

impl Of {
    fn pick(&self, tables: Tables) -> Tables {
        let wants = |network: &str| self.network.as_deref().is_none_or(|wanted| wanted == network);
        Tables {
            schema: SCHEMA,
            macs: tables.macs.into_iter().filter(|mac| wants(&mac.network)).collect(),
            neighbours: tables.neighbours.into_iter().filter(|n| wants(&n.network)).collect(),
            homes: tables.homes.map(|all| all.into_iter().filter(|home| wants(&home.network)).collect()),
            homes_revision: tables.homes_revision,
        }
    }
}

fn macs(tables: &Tables) -> Grid {
    let mut grid = Grid::new(&["NETWORK", "MAC", "PORT", "VLAN", ">LAST SEEN"]);
    for mac in &tables.macs {
        let age = mac.age_ms.map_or_else(|| "pinned".into(), |ms| span(ms as f64 / 1000.0));
        let vlan = mac.vlan.map_or_else(|| "-".into(), |vlan| vlan.to_string());
        grid.row(&[&mac.network, &mac.mac, &mac.port, &vlan, &age]);
    }
    grid
}

fn neighbours(tables: &Tables) -> Grid {
    let mut grid = Grid::new(&["NETWORK", "ADDRESS", "MAC", "PORT", "NAME", "SOURCE"]);
    for n in &tables.neighbours {
        let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        grid.row(&[&n.network, &n.ip.to_string(), &or(&n.mac), &or(&n.port), &or(&n.name), &n.source]);
    }
    grid
}

impl Table {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let (Table::Mac(of) | Table::Neighbours(of)) = self;
        let client = select.client()?;
        if let Some(network) = &of.network {
            let there: Vec<_> = client.status()?.networks.into_iter().map(|n| n.name).collect();
            if !there.contains(network) {
                let there = there.join(", ");
                return Err(Failure::failed(format!("no network \"{network}\"; there are: {there}")));
            }
        }
        let tables = of.pick(client.tables()?);
        match self {
            _ if of.json => out::json(&tables)?,
            Table::Mac(_) => out::print(&macs(&tables).render(out::colour()))?,
            Table::Neighbours(_) => out::print(&neighbours(&tables).render(out::colour()))?,
        }
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_host::api::report::{MacReport, NeighbourReport};

    #[test]
    fn tables_are_of_one_network_or_all() {
        let mac = |network: &str, age_ms| MacReport {
            network: network.into(),
            mac: "02:00:00:00:00:01".into(),
            port: "web".into(),
            age_ms,
            vlan: age_ms.map(|_| 10),
        };
        let neighbour = NeighbourReport {
            network: "lan".into(),
            ip: "fd00::1".parse().unwrap(),
            mac: None,
            port: None,
            name: Some("web".into()),
            source: "file".into(),
            fixed: false,
        };
        let all = Tables {
            schema: 1,
            macs: vec![mac("lan", Some(1500)), mac("wan", None)],
            neighbours: vec![neighbour],
            homes: Some(vec![]),
            homes_revision: String::new(),
        };
        let of = |network: Option<&str>| Of { network: network.map(String::from), json: false };
        assert_eq!(of(None).pick(all.clone()), all);
        let wan = of(Some("wan")).pick(all.clone());
        assert_eq!((wan.macs.len(), wan.neighbours.len()), (1, 0));
        let text = macs(&all).render(false);
        assert!(text.contains("1 s\n") && text.contains("pinned\n") && text.contains(" 10 "), "{text}");
        let text = neighbours(&all).render(false);
        assert_eq!(
            text.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>(),
            ["lan", "fd00::1", "-", "-", "web", "file"]
        );
    }
}
