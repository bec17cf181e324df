//! Network boot over DHCP and DHCPv6: what clients ask in bytes, and what they get.

use super::*;

/// A DISCOVER of client `n` with `options` behind the kind of message.
fn discover(n: u8, options: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x01\x01\x06\x00\xde\xad\xbe\xef\x00\x00\x80\x00".to_vec();
    bytes.extend_from_slice(&[0; 16]);
    bytes.extend_from_slice(&mac(n));
    bytes.resize(236, 0);
    bytes.extend_from_slice(b"\x63\x82\x53\x63\x35\x01\x01");
    bytes.extend_from_slice(options);
    bytes.push(0xff);
    bytes
}

/// What an answer says of boot: next-server, the field `file`, options 60, 66 and 67; and its
/// length.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    next: [u8; 4],
    field: String,
    class: Option<String>,
    server: Option<String>,
    file: Option<String>,
}

fn ask(world: &mut World, n: u8, options: &[u8]) -> (Told, usize) {
    let to_all = Route {
        source_mac: mac(n),
        destination_mac: [0xff; 6],
        source: Ipv4Addr::UNSPECIFIED,
        destination: Ipv4Addr::BROADCAST,
    };
    let frames = world.put(&packet::udp(&to_all, 68, 67, &discover(n, options))).unwrap();
    let bytes = udp_of(&frames[0]).3;
    let packet = DhcpPacket::new_checked(&bytes[..]).unwrap();
    let option =
        |code: u8| packet.options().find(|o| o.kind == code).map(|o| String::from_utf8(o.data.into()).unwrap());
    let field = bytes[108..236].split(|b| *b == 0).next().unwrap();
    assert!(bytes[44..108].iter().all(|b| *b == 0), "no server by name");
    let told = Told {
        next: bytes[20..24].try_into().unwrap(),
        field: String::from_utf8(field.into()).unwrap(),
        class: option(60),
        server: option(66),
        file: option(67),
    };
    (told, bytes.len())
}

fn network() -> BootConfig {
    BootConfig {
        server: Some(ip(5)),
        file: Some("undionly.kpxe".into()),
        architectures: vec![(7, "ipxe.efi".into()), (16, "http://10.9.0.5/ipxe.efi".into())],
        ipxe: Some("http://10.9.0.5/start.ipxe".into()),
        ..BootConfig::default()
    }
}

fn world(all: BootConfig, of: &[(u8, BootConfig)]) -> World {
    let mut world = World::new();
    let of = of.iter().map(|(n, config)| (mac(*n), config.clone())).collect();
    world.gateway.set_boot(BootTable { all: Some(all), of });
    world
}

/// What firmware sends: the parameters that it asks for, the size that it takes, its class and its
/// architecture.
fn firmware(class: &[u8], architecture: u8) -> Vec<u8> {
    let head = [&[55, 4, 1, 3, 66, 67, 57, 2, 5, 192, 60, class.len() as u8][..], class].concat();
    [&head[..], &[93, 2, 0, architecture]].concat()
}

#[test]
fn firmware_is_told_the_file_of_its_architecture() {
    let mut world = world(network(), &[]);
    let told = |file: &str| Told {
        next: [10, 9, 0, 5],
        field: file.into(),
        class: None,
        server: Some("10.9.0.5".into()),
        file: Some(file.into()),
    };
    assert_eq!(ask(&mut world, 1, &firmware(b"PXEClient:Arch:00000:UNDI:002001", 0)).0, told("undionly.kpxe"));
    assert_eq!(ask(&mut world, 1, &firmware(b"PXEClient:Arch:00007:UNDI:003016", 7)).0, told("ipxe.efi"));
    let url = "http://10.9.0.5/ipxe.efi";
    let http = Told { class: Some("HTTPClient".into()), ..told(url) };
    assert_eq!(ask(&mut world, 1, &firmware(b"HTTPClient:Arch:00016:UNDI:003001", 16)).0, http);
    assert_eq!(ask(&mut world, 1, &firmware(b"HTTPClient:Arch:00019:UNDI:003001", 19)).0, Told::default());
    assert_eq!(world.count("boot_answers"), 3);
}

#[test]
fn ipxe_is_told_what_comes_after_it_and_others_only_the_fields() {
    let mut world = world(network(), &[]);
    let ipxe = [&firmware(b"PXEClient:Arch:00007:UNDI:003010", 7)[..], b"\x4d\x04iPXE"].concat();
    assert_eq!(ask(&mut world, 1, &ipxe).0.file.as_deref(), Some("http://10.9.0.5/start.ipxe"));
    let told = ask(&mut world, 1, &[55, 2, 1, 3]).0;
    assert_eq!((told.next, told.field.as_str(), told.file), ([10, 9, 0, 5], "undionly.kpxe", None));
}

#[test]
fn a_member_has_its_own_and_a_change_counts_from_the_next_message() {
    let own = BootConfig { server: Some(ip(6)), file: Some("own".into()), ..BootConfig::default() };
    let mut world = world(network(), &[(2, own)]);
    let asks = firmware(b"PXEClient", 7);
    assert_eq!(ask(&mut world, 1, &asks).0.field, "ipxe.efi");
    let told = ask(&mut world, 2, &asks).0;
    assert_eq!((told.next, told.field.as_str()), ([10, 9, 0, 6], "own"));
    world.gateway.set_boot(BootTable::default());
    assert_eq!(ask(&mut world, 2, &asks).0, Told::default());
}

#[test]
fn an_answer_is_no_longer_than_its_client_takes() {
    let long = |n: usize| BootConfig { file: Some("f".repeat(n)), server: Some(ip(5)), ..BootConfig::default() };
    let mut config = config();
    config.domain = format!("{}.{}", "d".repeat(50), "e".repeat(49));
    let with = |boot| {
        let mut world = World::with(config.clone(), &LeaseStore::default());
        world.gateway.set_boot(BootTable { all: Some(boot), of: [].into() });
        world
    };
    let name = b"\x0c\x3fnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn";
    for length in [1, 127, 128, 255] {
        // A client that says nothing of its size, one that says too little, and one with room.
        for size in [&[][..], &[57, 2, 0, 40], &[57, 2, 5, 192], &[57, 2, 255, 255], &[57, 1, 5]] {
            let asks = [&[55, 1, 67][..], size, name].concat();
            let (told, bytes) = ask(&mut with(long(length)), 1, &asks);
            let room = if size.get(2) == Some(&5) && size[1] == 2 { 1472 } else { 548 };
            let room = if size.get(2) == Some(&255) { 1472 } else { room };
            assert!(bytes <= room, "{length} {size:?}: {bytes}");
            assert_eq!(told.field.len(), if length <= 127 { length } else { 0 });
            assert_eq!(told.next, [10, 9, 0, 5]);
            assert_eq!(told.file.is_some(), room == 1472 || length == 1, "{length} {size:?}");
        }
    }
}

#[test]
fn options_that_are_cut_or_senseless_change_nothing() {
    let mut world = world(network(), &[]);
    for options in
        [&[93, 1, 7][..], &[93, 0], &[60, 0], &[77, 0], &[55, 0], &[57, 0], &[57, 3, 1, 2, 3], &[93, 2, 255, 255]]
    {
        assert_eq!(ask(&mut world, 1, options).0.field, "undionly.kpxe", "{options:?}");
    }
    let whole = firmware(b"HTTPClient:Arch:00016", 16);
    for cut in 0..whole.len() {
        let to_all = Route {
            source_mac: mac(1),
            destination_mac: [0xff; 6],
            source: Ipv4Addr::UNSPECIFIED,
            destination: Ipv4Addr::BROADCAST,
        };
        let mut bytes = discover(1, &whole[..cut]);
        bytes.pop();
        let _ = world.put(&packet::udp(&to_all, 68, 67, &bytes));
    }
}
