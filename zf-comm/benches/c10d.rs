//! Collectives of 64 MiB of float32 between two ranks: processes over loopback beside threads.
//!
//! `cargo bench -p zf-comm --bench c10d` prints milliseconds, the median of ten.

use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};
use zf_comm::{C10d, C10dConfig, Threads, ThreadsConfig};
use zf_core::stage::{Collective, Fabric, Group, Reduce, Request, Transport};

const LEN: i64 = 16 << 20;
const ROUNDS: usize = 10;

fn main() {
    if std::env::var_os("ZF_BENCH_RANK").is_some() {
        let fabric = C10d::new(&C10dConfig::default()).expect("the parent sets all variables");
        let rank = fabric.local_ranks()[0];
        measure("c10d", rank, fabric.connect(rank).expect("both are started"));
        return;
    }
    let config = ThreadsConfig { ranks: 2, ..ThreadsConfig::default() };
    let fabric: Arc<dyn Fabric> = Arc::new(Threads::new(&config).expect("two ranks"));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let fabric = &fabric;
            scope.spawn(move || measure("threads", rank, fabric.connect(rank).expect("the seat is free")));
        }
    });
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("this has a binary"));
        command.env("ZF_BENCH_RANK", "").env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).spawn().expect("it starts")
    };
    for mut child in [start(0), start(1)] {
        child.wait().expect("it is our child");
    }
}

fn measure(transport_name: &str, rank: usize, mut transport: Box<dyn Transport>) {
    tch::set_num_threads(1);
    let zeros = |len: i64| Tensor::zeros([len], (Kind::Float, Device::Cpu));
    let (whole, result) = (zeros(LEN), zeros(LEN));
    let halves = |tensor: &Tensor| vec![tensor.narrow(0, 0, LEN / 2), tensor.narrow(0, LEN / 2, LEN / 2)];
    let make = |name: &str| match name {
        "reduce_scatter" => Collective::ReduceScatter {
            inputs: halves(&whole),
            output: result.narrow(0, 0, LEN / 2),
            accumulate: false,
        },
        "all_gather" => Collective::AllGather { input: whole.narrow(0, 0, LEN / 2), outputs: halves(&result) },
        "all_to_all" => Collective::AllToAll { inputs: halves(&whole), outputs: halves(&result) },
        "all_reduce" => Collective::AllReduce { tensor: whole.shallow_clone(), op: Reduce::Sum },
        "broadcast" => Collective::Broadcast { tensor: whole.shallow_clone(), root: 0 },
        _ => Collective::Exchange { bytes: vec![0; 64] },
    };
    for name in ["reduce_scatter", "all_gather", "all_to_all", "all_reduce", "broadcast", "exchange of 64 bytes"] {
        let mut times: Vec<Duration> = (0..ROUNDS + 2)
            .map(|_| {
                transport.barrier("begin").expect("both are here");
                let begin = Instant::now();
                let request = Request { group: Group::world(2), label: name.into(), collective: make(name) };
                transport.issue(request).and_then(|ticket| ticket.wait()).expect("both take part");
                begin.elapsed()
            })
            .skip(2)
            .collect();
        times.sort();
        if rank == 0 {
            println!("{transport_name:8} {name:22} {:9.3} ms", times[ROUNDS / 2].as_secs_f64() * 1e3);
        }
    }
}
