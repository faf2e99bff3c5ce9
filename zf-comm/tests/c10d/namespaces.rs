//! Two ranks in network namespaces of their own, as on two machines: what the transport counts is what the kernel's
//! interfaces count.

use std::process::Command;
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use zf_core::stage::{Collective, Group, Reduce, Transport};

use crate::common::{complete, noise};
use crate::processes::{Named, Ranks};

pub(crate) const SCENARIOS: &[Named] = &[("traffic", traffic)];

const LEN: usize = 2_000_000;
const PORT: u16 = 29_517;

/// Says how many bytes it counted and how many its interface sent.
fn traffic(rank: usize, mut transport: Box<dyn Transport>) -> String {
    let world = Group::world(2);
    let zeros = |len: usize| Tensor::zeros([len as i64], (Kind::Float, Device::Cpu));
    // Connects the group.
    transport.barrier("begin").expect("both are here");
    let (counted, sent) = (transport.bytes(), sent_bytes());
    let mut label = 0;
    let mut run = |collective: Collective| {
        label += 1;
        complete(&mut *transport, &world, &format!("{label}"), collective).expect("both take part");
    };
    run(Collective::AllReduce { tensor: noise(rank as u64, LEN, Kind::Float), op: Reduce::Sum });
    let inputs = vec![zeros(LEN), zeros(LEN)];
    run(Collective::ReduceScatter { inputs, output: zeros(LEN), accumulate: true });
    run(Collective::AllGather { input: zeros(LEN), outputs: vec![zeros(LEN), zeros(LEN)] });
    // Lengths that differ: rank 0 sends twice what it receives.
    let (to, from) = if rank == 0 { (LEN, LEN / 2) } else { (LEN / 2, LEN) };
    let pieces = |other: usize| {
        let mut pieces = vec![zeros(other), zeros(10)];
        if rank == 0 {
            pieces.swap(0, 1);
        }
        pieces
    };
    run(Collective::AllToAll { inputs: pieces(to), outputs: pieces(from) });
    let after = sent_bytes();
    let bytes = transport.bytes().since(&counted);
    let sum = bytes.all_reduce + bytes.reduce_scatter + bytes.all_gather + bytes.all_to_all;
    transport.barrier("end").expect("both are here");
    format!("{sum} {}", after - sent)
}

/// Bytes that the interfaces of this namespace have sent, without loopback.
fn sent_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/net/dev").expect("the kernel counts");
    let lines = text.lines().filter_map(|line| line.split_once(':')).filter(|(name, _)| name.trim() != "lo");
    lines.filter_map(|(_, numbers)| numbers.split_whitespace().nth(8)?.parse::<u64>().ok()).sum()
}

/// Two namespaces with a link between; gone on drop.
struct Namespaces([String; 2]);

impl Namespaces {
    /// Says why where the machine does not allow it.
    fn new() -> Result<Self, String> {
        let id = std::process::id();
        let names = [0, 1].map(|side| format!("zf-test-{id}-{side}"));
        let made = Self(names.clone());
        let [a, b] = &names;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["-n", a, "link", "add", "link0", "type", "veth", "peer", "name", "link1", "netns", b])?;
        for (side, name) in names.iter().enumerate() {
            let (link, address) = (format!("link{side}"), format!("10.213.7.{}/24", side + 1));
            ip(&["-n", name, "address", "add", &address, "dev", &link])?;
            ip(&["-n", name, "link", "set", &link, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(made)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            // One that was never made is no loss.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

#[test]
fn counted_bytes_are_those_of_the_interfaces() {
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(reason) => {
            println!("skipped: this machine gives no network namespaces: {reason}");
            return;
        }
    };
    let prefix = |rank: usize| {
        let name = &namespaces.0[rank];
        ["ip", "netns", "exec", name, "env", "LOCAL_WORLD_SIZE=1"].map(str::to_owned).to_vec()
    };
    let results = Ranks::start_each("traffic", 2, Duration::from_secs(40), "10.213.7.1", PORT, prefix).results(0..2);
    for (rank, said) in results.iter().enumerate() {
        let numbers: Vec<f64> = said.split(' ').map(|number| number.parse().expect(said)).collect();
        let (counted, sent) = (numbers[0], numbers[1]);
        let all_to_all = if rank == 0 { LEN } else { LEN / 2 };
        assert_eq!(counted, (4 * (3 * LEN + all_to_all)) as f64, "rank {rank}");
        assert!((sent / counted - 1.0).abs() < 0.05, "rank {rank} counted {counted}, its interface sent {sent}");
        println!("rank {rank} counted {counted}, its interface sent {sent}");
    }
}
