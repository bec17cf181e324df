//! Puts a Linux guest on a fabric's network through an ivshmem device.
#![forbid(unsafe_code)]
mod access;
#[allow(dead_code)]
mod error;
mod pci;
mod vfio;
fn main() {
    for d in pci::find(std::path::Path::new(pci::DEVICES)).unwrap() {
        println!("{d} {:?} {:?} {:?}", d.driver, d.iommu_group, vfio::obstacle(&d));
        match access::open(&d, access::Wakeups::Auto, 2) {
            Ok(a) => {
                println!("opened pos {} because {:?} bells {}", a.registers.position(), a.polled_because, a.doorbells.len());
                println!("{:?}", a.memory.view().read_array::<16>(0));
                a.registers.ring(0, 1);
                std::thread::sleep(std::time::Duration::from_secs(3));
                for b in &a.doorbells { println!("taken {}", b.take()); }
            }
            Err(e) => println!("{e}"),
        }
    }
}
