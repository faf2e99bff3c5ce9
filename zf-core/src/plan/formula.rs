//! The formulas of ZeRO from sizes alone (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
//! Parameter Models", SC 2020): bytes of model states, elements moved, and the largest model that fits.
//!
//! Psi is the number of parameters, N the number of ranks. Nothing is rounded: real runs add padding.

use serde::Serialize;

use crate::config::Accumulate;
use crate::layout::DType;

/// Bytes a parameter of each kind of state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StateBytes {
    /// Of the parameter itself.
    pub parameter: u64,
    /// Of its accumulated gradient.
    pub gradient: u64,
    /// Of the master and the states of the update rule: K in the paper.
    pub optimizer: u64,
}

impl StateBytes {
    /// The paper's mixed precision with Adam: 2 + 2 + 12.
    pub const PAPER: Self = Self { parameter: 2, gradient: 2, optimizer: 12 };

    /// Those of parameters of `dtype` under an update rule with `states` float32 states. A 16-bit parameter has a float32
    /// master; a float32 one is its own.
    pub fn new(dtype: DType, accumulate: Accumulate, states: usize) -> Self {
        let parameter = dtype.size() as u64;
        let gradient = match accumulate {
            Accumulate::Float32 => 4,
            Accumulate::Model => parameter,
        };
        let master = if parameter < 4 { 4 } else { 0 };
        Self { parameter, gradient, optimizer: master + 4 * states as u64 }
    }
}

/// Bytes of model states on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ZeroStates {
    /// Parameters.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// Masters and states.
    pub optimizer: f64,
}

impl ZeroStates {
    /// Their sum.
    pub fn total(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer
    }
}

/// Model states of `psi` parameters on each of `ranks` ranks under a ZeRO stage (section 5): stage 1 divides the optimizer
/// states by N, stage 2 also the gradients, stage 3 also the parameters.
pub fn zero_states(psi: f64, ranks: u64, stage: u8, bytes: &StateBytes) -> ZeroStates {
    let part = |from: u8| psi / if stage >= from { ranks.max(1) as f64 } else { 1.0 };
    ZeroStates {
        parameters: bytes.parameter as f64 * part(3),
        gradients: bytes.gradient as f64 * part(2),
        optimizer: bytes.optimizer as f64 * part(1),
    }
}

/// Elements that a rank sends in a step of one micro-batch (section 7): 2 Psi (N-1)/N under stages 0 to 2 (an all-reduce,
/// or a reduce-scatter and an all-gather), 3 Psi (N-1)/N under stage 3 (two all-gathers and a reduce-scatter).
pub fn zero_traffic(psi: f64, ranks: u64, stage: u8) -> f64 {
    let ranks = ranks.max(1) as f64;
    let times = if stage >= 3 { 3.0 } else { 2.0 };
    times * psi * (ranks - 1.0) / ranks
}

/// Parameters of the largest model whose states fit into `memory` bytes a rank.
pub fn largest_model(memory: f64, ranks: u64, stage: u8, bytes: &StateBytes) -> f64 {
    memory / zero_states(1.0, ranks, stage, bytes).total()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounded to `digits` decimals, half up.
    fn rounded(value: f64, digits: i32) -> f64 {
        let scale = 10f64.powi(digits);
        (value * scale + 0.5).floor() / scale
    }

    /// Cut after `digits` decimals.
    fn cut(value: f64, digits: i32) -> f64 {
        let scale = 10f64.powi(digits);
        (value * scale).floor() / scale
    }

    /// Section 5, in the paper's GB (10^9 bytes).
    fn gigabytes(psi: f64, ranks: u64) -> [f64; 3] {
        [1, 2, 3].map(|stage| zero_states(psi, ranks, stage, &StateBytes::PAPER).total() / 1e9)
    }

    /// Table 1. The column of 7.5 B is rounded to one decimal, below 2 GB to two. The columns of 128 B and 1 T are cut to
    /// whole GB, below 100 GB to one decimal.
    #[test]
    fn table_1_of_the_paper() {
        let table: [(u64, [[f64; 3]; 3]); 6] = [
            (1, [[120.0, 120.0, 120.0], [2048.0, 2048.0, 2048.0], [16000.0, 16000.0, 16000.0]]),
            (4, [[52.5, 41.3, 30.0], [896.0, 704.0, 512.0], [7000.0, 5500.0, 4000.0]]),
            (16, [[35.6, 21.6, 7.5], [608.0, 368.0, 128.0], [4750.0, 2875.0, 1000.0]]),
            (64, [[31.4, 16.6, 1.88], [536.0, 284.0, 32.0], [4187.0, 2218.0, 250.0]]),
            (256, [[30.4, 15.4, 0.47], [518.0, 263.0, 8.0], [4046.0, 2054.0, 62.5]]),
            (1024, [[30.1, 15.1, 0.12], [513.0, 257.0, 2.0], [4011.0, 2013.0, 15.6]]),
        ];
        for (ranks, [small, middle, large]) in table {
            let printed = |value: f64| rounded(value, if value < 2.0 { 2 } else { 1 });
            assert_eq!(gigabytes(7.5e9, ranks).map(printed), small, "7.5 B on {ranks}");
            let printed = |value: f64| cut(value, if value < 100.0 { 1 } else { 0 });
            assert_eq!(gigabytes(128e9, ranks).map(printed), middle, "128 B on {ranks}");
            assert_eq!(gigabytes(1e12, ranks).map(printed), large, "1 T on {ranks}");
        }
    }

    /// Table 2, largest model on 32 GB with 64 data-parallel ranks, times the ways of model parallelism. The paper cuts the
    /// first row to one decimal and multiplies what is left.
    #[test]
    fn table_2_of_the_paper() {
        let billions = |stage| cut(largest_model(32e9, 64, stage, &StateBytes::PAPER) / 1e9, 1);
        let rows = [
            (1.0, [2.0, 7.6, 14.4, 128.0]),
            (2.0, [4.0, 15.2, 28.8, 256.0]),
            (4.0, [8.0, 30.4, 57.6, 512.0]),
            (8.0, [16.0, 60.8, 115.2, 1024.0]),
            (16.0, [32.0, 121.6, 230.4, 2048.0]),
        ];
        for (ways, expected) in rows {
            assert_eq!([0, 1, 2, 3].map(|stage| rounded(ways * billions(stage), 1)), expected, "{ways} ways");
        }
    }

    /// The three columns of bytes a parameter with Adam: constant part, and part divided by N.
    #[test]
    fn bytes_a_parameter() {
        let columns = [
            (DType::Bfloat16, Accumulate::Model, [(16.0, 0.0), (4.0, 12.0), (2.0, 14.0), (0.0, 16.0)]),
            (DType::Bfloat16, Accumulate::Float32, [(18.0, 0.0), (6.0, 12.0), (2.0, 16.0), (0.0, 18.0)]),
            (DType::Float32, Accumulate::Float32, [(16.0, 0.0), (8.0, 8.0), (4.0, 12.0), (0.0, 16.0)]),
        ];
        for (dtype, accumulate, rows) in columns {
            for (stage, (whole, divided)) in (0..).zip(rows) {
                for ranks in [1, 2, 8, 64] {
                    let found = zero_states(1024.0, ranks, stage, &StateBytes::new(dtype, accumulate, 2)).total();
                    let expected = 1024.0 * (whole + divided / ranks as f64);
                    assert_eq!(found, expected, "{dtype:?} {accumulate:?} stage {stage} on {ranks}");
                }
            }
        }
        // SGD with momentum and without.
        assert_eq!(StateBytes::new(DType::Bfloat16, Accumulate::Model, 1).optimizer, 8);
        assert_eq!(StateBytes::new(DType::Float16, Accumulate::Model, 0).optimizer, 4);
    }

    #[test]
    fn elements_moved() {
        assert_eq!([0, 1, 2, 3].map(|stage| zero_traffic(100.0, 4, stage)), [150.0, 150.0, 150.0, 225.0]);
        assert_eq!([0, 1, 2, 3].map(|stage| zero_traffic(100.0, 1, stage)), [0.0; 4]);
    }
}
