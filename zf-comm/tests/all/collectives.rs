//! What collectives compute, bit for bit, against plain tensor operations one after the other.

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};
use zf_core::stage::{Collective, CommBytes, Group, Reduce};

use crate::common::{KINDS, bits, complete, floats, issue, noise, run, world};

/// Sums in the order given, in float32 for 16-bit types, rounded at the end to `output`.
fn ordered_sum(start: Option<&Tensor>, addends: &[Tensor], output: Kind) -> Tensor {
    let wide = |tensor: &Tensor| match tensor.kind() {
        Kind::Half | Kind::BFloat16 => tensor.to_kind(Kind::Float),
        _ => tensor.copy(),
    };
    let mut all = start.into_iter().chain(addends).map(wide);
    let first = all.next().expect("something to add");
    all.fold(first, |sum, addend| sum + addend).to_kind(output)
}

fn piece(seed: u64, rank: usize, member: usize, len: usize, kind: Kind) -> Tensor {
    noise(seed * 1000 + (rank * 10 + member) as u64, len, kind)
}

fn zeros(len: usize, kind: Kind) -> Tensor {
    Tensor::zeros([len as i64], (kind, Device::Cpu))
}

/// The outputs that sums of this kind may have.
fn outputs(kind: Kind) -> Vec<Kind> {
    match kind {
        Kind::Half | Kind::BFloat16 => vec![kind, Kind::Float],
        _ => vec![kind],
    }
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    // Empty, tiny, about a block of the kernels, and long enough for the progress threads.
    let size = prop_oneof![2 => Just(0), 4 => 1_usize..70, 2 => 2040_usize..2060, 1 => 9000_usize..20_000];
    proptest::collection::vec(size, 1..=4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reduce_scatter_adds_in_the_order_of_members(sizes in sizes(), seed in 0_u64..1000, accumulate: bool) {
        let n = sizes.len();
        for kind in KINDS {
            for output in outputs(kind) {
                let results = run(&world(n), |rank, mut transport| {
                    let inputs = (0..n).map(|m| piece(seed, rank, m, sizes[m], kind)).collect();
                    let result = noise(seed + 7, sizes[rank], output);
                    let collective =
                        Collective::ReduceScatter { inputs, output: result.shallow_clone(), accumulate };
                    complete(&mut *transport, &Group::world(n), "sum", collective).expect("all take part");
                    result
                });
                for (rank, result) in results.iter().enumerate() {
                    let addends: Vec<_> = (0..n).map(|s| piece(seed, s, rank, sizes[rank], kind)).collect();
                    let start = accumulate.then(|| noise(seed + 7, sizes[rank], output));
                    let expected = ordered_sum(start.as_ref(), &addends, output);
                    prop_assert_eq!(bits(result), bits(&expected), "{:?} into {:?}, rank {}", kind, output, rank);
                }
            }
        }
    }

    #[test]
    fn all_reduce_gives_every_rank_the_same(sizes in sizes(), seed in 0_u64..1000, max: bool) {
        let (n, len) = (sizes.len(), sizes[0]);
        let op = if max { Reduce::Max } else { Reduce::Sum };
        for kind in KINDS {
            let results = run(&world(n), |rank, mut transport| {
                let tensor = piece(seed, rank, 0, len, kind);
                let collective = Collective::AllReduce { tensor: tensor.shallow_clone(), op };
                complete(&mut *transport, &Group::world(n), "all", collective).expect("all take part");
                tensor
            });
            let addends: Vec<_> = (0..n).map(|s| piece(seed, s, 0, len, kind)).collect();
            let expected = if max {
                addends[1..].iter().fold(addends[0].copy(), |a, b| a.maximum(b))
            } else {
                ordered_sum(None, &addends, kind)
            };
            for result in &results {
                prop_assert_eq!(bits(result), bits(&expected), "{:?}", kind);
            }
        }
    }

    #[test]
    fn all_gather_all_to_all_and_broadcast_move_the_right_pieces(sizes in sizes(), seed in 0_u64..1000) {
        let n = sizes.len();
        let root = seed as usize % n;
        for kind in KINDS {
            let results = run(&world(n), |rank, mut transport| {
                let group = Group::world(n);
                let gathered: Vec<_> = sizes.iter().map(|len| zeros(*len, kind)).collect();
                // In place: the own output is the input.
                gathered[rank].shallow_clone().copy_(&piece(seed, rank, 0, sizes[rank], kind));
                let gather = Collective::AllGather {
                    input: gathered[rank].shallow_clone(),
                    outputs: gathered.iter().map(Tensor::shallow_clone).collect(),
                };
                // Member s sends `sizes[m]` elements to m, so that m receives as many from each.
                let received: Vec<_> = (0..n).map(|_| zeros(sizes[rank], kind)).collect();
                let exchange = Collective::AllToAll {
                    inputs: (0..n).map(|m| piece(seed, rank, m, sizes[m], kind)).collect(),
                    outputs: received.iter().map(Tensor::shallow_clone).collect(),
                };
                let sent = piece(seed, rank, 0, sizes[0], kind);
                let broadcast = Collective::Broadcast { tensor: sent.shallow_clone(), root };
                let tickets = [gather, exchange, broadcast]
                    .map(|collective| issue(&mut *transport, &group, "move", collective).expect("fits"));
                for ticket in tickets {
                    ticket.wait().expect("all take part");
                }
                (gathered, received, sent)
            });
            for (rank, (gathered, received, sent)) in results.iter().enumerate() {
                for s in 0..n {
                    prop_assert_eq!(bits(&gathered[s]), bits(&piece(seed, s, 0, sizes[s], kind)));
                    prop_assert_eq!(bits(&received[s]), bits(&piece(seed, s, rank, sizes[rank], kind)));
                }
                prop_assert_eq!(bits(sent), bits(&piece(seed, root, 0, sizes[0], kind)));
            }
        }
    }
}

#[test]
fn accumulating_differs_from_adding_the_ranks_up_first() {
    // 1 + 2^-24 + 2^-24: one after the other both are lost, together they count.
    let small = 2_f32.powi(-24);
    let results = run(&world(2), |rank, mut transport| {
        let output = floats(&[1.0]);
        let mut inputs = vec![floats(&[]), floats(&[])];
        inputs[0] = floats(&[small]);
        let mine = if rank == 0 { output.shallow_clone() } else { floats(&[]) };
        let collective = Collective::ReduceScatter { inputs, output: mine, accumulate: true };
        complete(&mut *transport, &Group::world(2), "order", collective).expect("both take part");
        output
    });
    assert_eq!(bits(&results[0]), bits(&floats(&[1.0])));
}

#[test]
fn a_chain_of_accumulations_and_a_gather_needs_no_waits_between() {
    const N: usize = 3;
    const LEN: usize = 30_000;
    const ROUNDS: u64 = 5;
    let results = run(&world(N), |rank, mut transport| {
        let group = Group::world(N);
        let sum = zeros(LEN, Kind::Float);
        let mut tickets = Vec::new();
        for round in 0..ROUNDS {
            let inputs = (0..N).map(|m| piece(round, rank, m, LEN, Kind::BFloat16)).collect();
            let collective = Collective::ReduceScatter { inputs, output: sum.shallow_clone(), accumulate: true };
            tickets.push(issue(&mut *transport, &group, &format!("round {round}"), collective).expect("fits"));
        }
        let gathered: Vec<_> = (0..N).map(|_| zeros(LEN, Kind::Float)).collect();
        let outputs = gathered.iter().map(Tensor::shallow_clone).collect();
        let gather = Collective::AllGather { input: sum.shallow_clone(), outputs };
        tickets.push(issue(&mut *transport, &group, "gather", gather).expect("fits"));
        for ticket in tickets.into_iter().rev() {
            ticket.wait().expect("all take part");
        }
        gathered
    });
    for gathered in &results {
        for (member, gathered) in gathered.iter().enumerate() {
            let addends: Vec<_> = (0..ROUNDS)
                .flat_map(|round| (0..N).map(move |s| piece(round, s, member, LEN, Kind::BFloat16)))
                .collect();
            let expected = ordered_sum(Some(&zeros(LEN, Kind::Float)), &addends, Kind::Float);
            assert_eq!(bits(gathered), bits(&expected));
        }
    }
}

#[test]
fn a_reduce_scatter_may_write_over_its_own_piece() {
    let results = run(&world(3), |rank, mut transport| {
        let inputs: Vec<_> = (0..3).map(|m| piece(4, rank, m, 25_000, Kind::Float)).collect();
        let output = inputs[rank].shallow_clone();
        let collective = Collective::ReduceScatter { inputs, output: output.shallow_clone(), accumulate: false };
        complete(&mut *transport, &Group::world(3), "in place", collective).expect("all take part");
        output
    });
    for (rank, result) in results.iter().enumerate() {
        let addends: Vec<_> = (0..3).map(|s| piece(4, s, rank, 25_000, Kind::Float)).collect();
        assert_eq!(bits(result), bits(&ordered_sum(None, &addends, Kind::Float)));
    }
}

#[test]
fn groups_do_not_wait_for_each_other() {
    // Every pair of three ranks, each rank in an order of its own that would be a circle if one waited for another.
    let orders = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]];
    let results = run(&world(3), |rank, mut transport| {
        let mut total = 0.0;
        for round in 0..20 {
            let issued: Vec<_> = orders[rank]
                .iter()
                .map(|&(a, b)| {
                    let tensor = Tensor::full([30_000], (rank + 1) as f64, (Kind::Float, Device::Cpu));
                    let collective = Collective::AllReduce { tensor: tensor.shallow_clone(), op: Reduce::Sum };
                    let group = Group::new(vec![a, b]);
                    (issue(&mut *transport, &group, &format!("round {round}"), collective).expect("fits"), tensor)
                })
                .collect();
            for (ticket, tensor) in issued {
                ticket.wait().expect("both take part");
                assert_eq!(tensor.min().double_value(&[]), tensor.max().double_value(&[]));
                total += tensor.double_value(&[29_999]);
            }
        }
        total
    });
    assert_eq!(results, [20.0 * (3.0 + 4.0), 20.0 * (5.0 + 3.0), 20.0 * (4.0 + 5.0)]);
}

#[test]
fn a_group_may_have_any_order() {
    let results = run(&world(3), |rank, mut transport| {
        let group = Group::new(vec![2, 0]);
        if rank == 1 {
            return None;
        }
        let inputs = vec![floats(&[rank as f32]), floats(&[10.0 + rank as f32, 0.5])];
        let output = zeros(if rank == 2 { 1 } else { 2 }, Kind::Float);
        let collective = Collective::ReduceScatter { inputs, output: output.shallow_clone(), accumulate: false };
        complete(&mut *transport, &group, "two of three", collective).expect("both take part");
        Some(bits(&output))
    });
    assert_eq!(results, [Some(bits(&floats(&[22.0, 1.0]))), None, Some(bits(&floats(&[2.0])))]);
}

#[test]
fn exchanges_carry_bytes_of_any_length() {
    for n in 1..=4 {
        let results = run(&world(n), |rank, mut transport| {
            let all = transport.exchange("sizes", vec![rank as u8; rank * 3]).expect("all take part");
            transport.barrier("end").expect("all take part");
            (all, transport.bytes().control)
        });
        let expected: Vec<Vec<u8>> = (0..n).map(|rank| vec![rank as u8; rank * 3]).collect();
        for (rank, (all, control)) in results.iter().enumerate() {
            assert_eq!(*all, expected);
            assert_eq!(*control, (rank * 3 * (n - 1)) as u64);
        }
    }
}

#[test]
fn bytes_are_those_of_a_ring() {
    const N: usize = 4;
    const EACH: usize = 1000;
    let results = run(&world(N), |rank, mut transport| {
        let group = Group::world(N);
        let kind = Kind::BFloat16;
        let many = || (0..N).map(|_| zeros(EACH, kind)).collect::<Vec<_>>();
        let outputs = many();
        let all = [
            Collective::AllReduce { tensor: zeros(N * EACH, kind), op: Reduce::Sum },
            Collective::ReduceScatter { inputs: many(), output: zeros(EACH, Kind::Float), accumulate: true },
            Collective::AllGather { input: outputs[rank].shallow_clone(), outputs },
            Collective::AllToAll { inputs: many(), outputs: many() },
            Collective::Broadcast { tensor: zeros(N * EACH, kind), root: 1 },
            Collective::Exchange { bytes: vec![1; 10] },
        ];
        for collective in all {
            complete(&mut *transport, &group, "count", collective).expect("all take part");
        }
        // Uneven pieces: each rank sends all but its own.
        let uneven = (0..N).map(|m| zeros(m * 3, Kind::Double)).collect();
        let own = zeros(rank * 3, Kind::Double);
        let collective = Collective::ReduceScatter { inputs: uneven, output: own, accumulate: false };
        complete(&mut *transport, &group, "uneven", collective).expect("all take part");
        transport.bytes()
    });
    let buffer = (N * EACH * 2) as u64;
    let ring = buffer / 4 * 3;
    let uneven: Vec<u64> = (0..4).map(|rank| (3 + 6 + 9 - 3 * rank) * 8).collect();
    for (rank, bytes) in results.into_iter().enumerate() {
        let expected = CommBytes {
            all_reduce: 2 * ring,
            reduce_scatter: ring + uneven[rank],
            all_gather: ring,
            all_to_all: ring,
            broadcast: ring,
            control: 30,
        };
        assert_eq!(bytes, expected, "rank {rank}");
    }
    assert_eq!(uneven.iter().sum::<u64>(), 3 * (3 + 6 + 9) * 8);
}

#[test]
fn one_rank_needs_nobody() {
    run(&world(1), |_, mut transport| {
        let group = Group::world(1);
        let output = zeros(50_000, Kind::Float);
        let reduce = Collective::ReduceScatter {
            inputs: vec![noise(1, 50_000, Kind::BFloat16)],
            output: output.shallow_clone(),
            accumulate: false,
        };
        let gathered = zeros(50_000, Kind::Float);
        let gather = Collective::AllGather { input: output.shallow_clone(), outputs: vec![gathered.shallow_clone()] };
        // Nothing to do by itself, but it must come after the two before it.
        let all = Collective::AllReduce { tensor: gathered.shallow_clone(), op: Reduce::Sum };
        let tickets = [reduce, gather, all].map(|c| issue(&mut *transport, &group, "alone", c).expect("fits"));
        let [_, _, last] = tickets;
        last.wait().expect("nobody is missing");
        assert_eq!(bits(&gathered), bits(&noise(1, 50_000, Kind::BFloat16).to_kind(Kind::Float)));
        assert_eq!(transport.bytes(), CommBytes::default());
    });
}
