//! The same bits on any number of ranks and however the states are split, with windows, delays and columns that move.

use zf_core::layout::DType;
use zf_core::stage::AccumulateOn;
use zf_partition::{Scope, Scopes, ZeroConfig};

use super::{Zenflow, drained, expect};
use crate::lab::Lab;

const STEPS: usize = 7;

fn tiny(name: &str, dtype: DType) -> Lab {
    Lab::tiny(name).with(|lab| {
        (lab.global, lab.micro) = (12, 1);
        lab.options.dtype = dtype;
        lab.options.clip = 1.0;
    })
}

/// Which layouts: all, or like a chessboard's black and white fields.
#[derive(Clone, Copy)]
enum Layouts {
    All,
    Black,
    White,
}

impl Layouts {
    fn has(self, at: usize) -> bool {
        let white = (at + at / 4) % 2 == 1;
        match self {
            Self::All => true,
            Self::Black => !white,
            Self::White => white,
        }
    }
}

/// All stages on one to four ranks, and scopes between stages.
fn check(name: &str, dtype: DType, zenflow: &Zenflow, layouts: Layouts) {
    let base = zenflow.of(&tiny(name, dtype));
    let known = drained(&base.on(1, 0), STEPS);
    let losses: Vec<f64> = known.0.iter().map(|report| report.loss).collect();
    assert!(losses[STEPS - 1] < losses[0], "nothing is learned: {losses:?}");
    let stages = (1..=4).flat_map(|ranks| (0..=3).map(move |stage| (ranks, stage)));
    let stages = stages.map(|(ranks, stage)| base.on(ranks, stage));
    let scopes = [(1, 2, 4), (2, 2, 4), (1, 1, 2), (2, 4, 4)].map(|(p, g, o)| {
        let scope = Scopes { p: Scope::Ranks(p), g: Scope::Ranks(g), o: Scope::Ranks(o) };
        base.with(|lab| (lab.ranks, lab.zero) = (4, ZeroConfig::scope(scope))).bucket(7_000)
    });
    // The first one is known.
    for (_, lab) in stages.chain(scopes).enumerate().skip(1).filter(|(at, _)| layouts.has(*at)) {
        expect(name, &known, &lab, STEPS);
    }
}

#[test]
fn llama_asynchronous() {
    check("tiny-llama", DType::Bfloat16, &Zenflow::new(0.2, 2, 2), Layouts::All);
}

#[test]
fn gpt2_late() {
    check("tiny-gpt2", DType::Float32, &Zenflow::new(0.1, 3, 3).late(), Layouts::Black);
}

#[test]
fn gpt2_synchronous_on_the_device() {
    let zenflow = Zenflow::new(0.3, 2, 4).synchronous();
    let zenflow = zenflow.with(|z| z.config.accumulate = AccumulateOn::Device);
    check("tiny-gpt2", DType::Bfloat16, &zenflow, Layouts::White);
}
