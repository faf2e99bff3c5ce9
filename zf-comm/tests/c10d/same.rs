//! Processes compute the same bits, count the same bytes and refuse the same requests as threads.

use std::fmt::Write;
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use zf_comm::{Threads, ThreadsConfig};
use zf_core::stage::{Channel, Collective, Fabric, Group, Reduce, Transport};

use crate::common::{KINDS, bits, issue, noise, run};
use crate::processes::{Named, Ranks};

pub(crate) const SCENARIOS: &[Named] = &[("battery", battery), ("conflicts", conflicts)];

/// Lengths of pieces: empty, in the envelope, at its limit, several messages, several chunks.
const LENGTHS: [[usize; 3]; 6] =
    [[0, 5, 3], [196, 197, 98], [1000, 0, 777], [5_001, 5_000, 1], [0, 0, 0], [800_001, 700_000, 5]];

fn zeros(len: usize, kind: Kind) -> Tensor {
    Tensor::zeros([len as i64], (kind, Device::Cpu))
}

fn clones(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

/// Everything that these ranks can do together, and its results.
fn collectives(
    seed: u64,
    member: usize,
    size: usize,
    lengths: &[usize; 3],
    kind: Kind,
) -> Vec<(Collective, Vec<Tensor>)> {
    let len = |m: usize| lengths[m % 3];
    let piece = |from: usize, to: usize, len: usize| noise(seed * 100 + (from * 10 + to) as u64, len, kind);
    let mut all = Vec::new();
    for op in [Reduce::Sum, Reduce::Max] {
        let tensor = piece(member, 0, lengths.iter().sum());
        all.push((Collective::AllReduce { tensor: tensor.shallow_clone(), op }, vec![tensor]));
    }
    let outputs = match kind {
        Kind::Half | Kind::BFloat16 => vec![kind, Kind::Float],
        _ => vec![kind],
    };
    for output in outputs {
        for accumulate in [false, true] {
            let inputs = (0..size).map(|m| piece(member, m, len(m))).collect();
            let sum = noise(seed + 3, len(member), output);
            all.push((Collective::ReduceScatter { inputs, output: sum.shallow_clone(), accumulate }, vec![sum]));
        }
    }
    // Over the own piece.
    let inputs: Vec<_> = (0..size).map(|m| piece(member, m, len(m))).collect();
    let output = inputs[member].shallow_clone();
    all.push((Collective::ReduceScatter { inputs, output: output.shallow_clone(), accumulate: false }, vec![output]));
    let gathered: Vec<_> = (0..size).map(|m| zeros(len(m), kind)).collect();
    let gather = Collective::AllGather { input: piece(member, 1, len(member)), outputs: clones(&gathered) };
    all.push((gather, gathered));
    let received: Vec<_> = (0..size).map(|m| zeros(len(member + m), kind)).collect();
    let inputs = (0..size).map(|m| piece(member, m, len(member + m))).collect();
    all.push((Collective::AllToAll { inputs, outputs: clones(&received) }, received));
    for root in 0..size {
        let tensor = piece(member, 2, lengths.iter().sum::<usize>());
        all.push((Collective::Broadcast { tensor: tensor.shallow_clone(), root }, vec![tensor]));
    }
    all
}

fn battery(rank: usize, mut transport: Box<dyn Transport>) -> String {
    let world = transport.world();
    let mut said = String::new();
    // Every group with this rank, on two channels, all at once; the order of the second pair is another on each rank.
    let mut groups = vec![Group::world(world), Group::new((0..world).rev().collect()).on(Channel::Gradients)];
    let pairs = (0..world).map(|other| Group::new(vec![rank.min(other), rank.max(other)]).on(Channel::Parameters));
    groups.extend(pairs.enumerate().filter(|(other, _)| *other != rank).map(|(_, group)| group));
    groups.push(Group::new(vec![rank]));
    for (round, lengths) in LENGTHS.iter().enumerate() {
        let many = lengths[0] > 100_000;
        let (kinds, groups) = if many { (&KINDS[..1], &groups[..1]) } else { (&KINDS[..], &groups[..]) };
        for kind in kinds {
            let mut waiting = Vec::new();
            for group in groups {
                let member = group.index(rank).expect("a group of this rank");
                for (collective, results) in collectives(round as u64, member, group.size(), lengths, *kind) {
                    let label = format!("{kind:?} {lengths:?}");
                    let name = collective.name();
                    let ticket = issue(&mut *transport, group, &label, collective).expect("all fit");
                    waiting.push((format!("{name} {label} {:?}", group.ranks()), ticket, results));
                }
            }
            for (what, ticket, results) in waiting {
                ticket.wait().expect("all take part");
                for result in results {
                    writeln!(said, "{what}: {:016x}", digest(&bits(&result))).expect("memory");
                }
            }
        }
    }
    for len in [0, 1, 784, 785, 100_000] {
        let blobs = transport.exchange("bytes", vec![rank as u8; len * (rank + 1)]).expect("all take part");
        writeln!(said, "exchange {:?}", blobs.iter().map(|blob| digest(blob)).collect::<Vec<_>>()).expect("memory");
    }
    transport.barrier("end").expect("all take part");
    writeln!(said, "{:?}", transport.bytes()).expect("memory");
    said
}

fn digest(bytes: &[u8]) -> u64 {
    let words =
        bytes.chunks(8).map(|chunk| chunk.iter().fold(chunk.len() as u64, |word, byte| word << 8 ^ u64::from(*byte)));
    words.fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
        (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}

fn conflicts(rank: usize, mut transport: Box<dyn Transport>) -> String {
    // One world for each, since a conflict ends it: the scenario is chosen by the number of ranks.
    let world = transport.world();
    let group = Group::world(world);
    let ones = |len: usize, kind: Kind| Tensor::ones([len as i64], (kind, Device::Cpu));
    let piece = |kind: Kind| Collective::ReduceScatter {
        inputs: (0..world).map(|m| ones(if m == 1 && rank == 1 { 3 } else { 2 }, kind)).collect(),
        output: ones(if rank == 1 { 3 } else { 2 }, kind),
        accumulate: false,
    };
    let collective = match world {
        2 => piece(Kind::Float),
        _ if rank == 2 => Collective::Broadcast { tensor: ones(4, Kind::Float), root: 0 },
        _ => Collective::AllReduce { tensor: ones(4, Kind::Float), op: Reduce::Sum },
    };
    let label = if rank == 2 { "parameters" } else { "gradients" };
    issue(&mut *transport, &group, label, collective)
        .and_then(|ticket| ticket.wait())
        .expect_err("they differ")
        .to_string()
}

fn by_threads(world: usize, scenario: crate::processes::Scenario) -> Vec<String> {
    let config = ThreadsConfig { ranks: world, timeout: Duration::from_secs(30), ..ThreadsConfig::default() };
    let fabric: std::sync::Arc<dyn Fabric> = std::sync::Arc::new(Threads::new(&config).expect("at least one rank"));
    run(&fabric, scenario)
}

fn compare(world: usize) {
    let mut ranks = Ranks::start("battery", world, Duration::from_secs(40));
    let expected = by_threads(world, battery);
    for (rank, expected) in expected.iter().enumerate() {
        let found = ranks.result(rank);
        for (found, expected) in found.lines().zip(expected.lines()) {
            assert_eq!(found, expected, "rank {rank}");
        }
        assert_eq!(found.lines().count(), expected.lines().count());
    }
}

#[test]
fn two_processes_compute_the_same_bits_as_threads() {
    compare(2);
}

#[test]
fn three_processes_compute_the_same_bits_as_threads() {
    compare(3);
}

#[test]
fn conflicting_lengths_are_refused_with_both() {
    let results = Ranks::start("conflicts", 2, Duration::from_secs(30)).results(0..2);
    for error in results {
        let expected = "reduce_scatter #0 \"gradients\" in group [0, 1]: rank 0 has 2 elements of float32 for piece 1, but \
                        rank 1 has 3 elements of float32 for piece 1";
        assert_eq!(error, expected);
    }
}

#[test]
fn conflicting_collectives_are_refused_with_both() {
    for error in Ranks::start("conflicts", 3, Duration::from_secs(30)).results(0..3) {
        let one = |rank: usize| {
            format!(
                "#0 in group [0, 1, 2]: rank {rank} issued all_reduce \"gradients\", but rank 2 issued broadcast \
                 \"parameters\"; all ranks of a group must issue the same collectives in the same order"
            )
        };
        assert!(error == one(0) || error == one(1), "{error}");
    }
}
