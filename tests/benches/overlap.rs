//! Whether communication hides behind computation: `cargo bench -p zf-tests --bench overlap`.
//!
//! Two ranks train a Llama of equal blocks, once over the plain transport and once over one that completes each
//! collective half a block's backward time later. Without overlap a step would grow by a delay for each collective.
//! With stage 0 the reduction of the first layer remains, whose gradient comes last: fails when a step grows by 1.5
//! delays or more. With stage 1 the gather of the same layer follows, which the next forward pass needs first: two
//! delays, since the one needs the other's result. That figure is printed only.

use std::time::Duration;

use zf_comm::{Delayed, wrap};
use zf_tests::{Ran, train_with};

const LAYERS: usize = 6;
const STEPS: usize = 8;

fn main() {
    let mut worst = f64::INFINITY;
    for stage in [0, 1] {
        let base = median(&run(stage, None), |r| r.seconds.step);
        let plain = run(stage, None);
        let unit = median(&plain, |r| r.seconds.backward) / (LAYERS as f64 + 1.0);
        let delay = Duration::from_secs_f64(unit / 2.0);
        let mut growths = Vec::new();
        for _ in 0..5 {
            let without = median(&run(stage, None), |r| r.seconds.step);
            let with = median(&run(stage, Some(delay)), |r| r.seconds.step);
            growths.push((with - without) / delay.as_secs_f64());
        }
        growths.sort_by(f64::total_cmp);
        let collectives = LAYERS + 2;
        println!(
            "stage {stage}: step {:.0} ms, delay {:.0} ms on each of {collectives} reductions{}, step grows by {:.2} delays (pairs: {growths:.2?})",
            base * 1e3,
            delay.as_secs_f64() * 1e3,
            if stage == 1 { " and as many gathers" } else { "" },
            growths[2],
        );
        if stage == 0 {
            worst = growths[2];
        }
    }
    if worst >= 1.5 {
        eprintln!("communication is not hidden: a step grows by {worst:.2} delays, allowed are 1.5");
        std::process::exit(1);
    }
}

fn run(stage: u8, delay: Option<Duration>) -> Ran {
    let text = format!(
        "model.arch = \"llama\"\nmodel.hidden_size = 256\nmodel.intermediate_size = 688\nmodel.num_hidden_layers = {LAYERS}\n\
         model.num_attention_heads = 4\nmodel.num_key_value_heads = 4\nmodel.vocab_size = 256\n\
         model.max_position_embeddings = 256\ndata.path = {:?}\ndata.sequence_length = 256\n\
         run.steps = {STEPS}\nrun.global_batch = 8\nrun.micro_batch = 4\nrun.checkpoint = {{ every = 0, best = false }}\n\
         transport.ranks = 2\npartition.stage = {stage}\nlog.trace = false\nlog.tensorboard = false\n",
        zf_tests::golden("tokens.bin")
    );
    train_with(&text, |fabric| match delay {
        None => fabric,
        Some(delay) => wrap(fabric, move |_, inner| Box::new(Delayed::new(inner, delay))),
    })
}

/// The median over the steps after the first.
fn median(ran: &Ran, figure: fn(&zf_core::record::StepRecord) -> f64) -> f64 {
    let mut values: Vec<f64> = ran.records[1..].iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
