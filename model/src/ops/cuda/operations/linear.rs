//! Linear layers. Layers that read one x are one product where their weights lie one below the other and their
//! outputs side by side, as `stack` and the gradients of attention and perceptron lay them.

use super::CudaOperations;
use crate::ops::cuda::matmul::Onto;
use crate::ops::cuda::matrix::{Element, Matrix};
use crate::ops::{Linear, LinearGradient};
use crate::{Error, Result, Tensor};

/// What products of an operand like this give.
fn output_element(x: &Matrix) -> Element {
    match x.element() {
        Element::F32 => Element::F32,
        _ => Element::Bf16,
    }
}

fn no_layers(operation: &'static str) -> Error {
    Error::Shape {
        operation,
        expected: "at least one layer".to_owned(),
        found: "none".to_owned(),
    }
}

/// Outputs side by side and weights one below the other, where they lie so and each weight has as many rows as its
/// own output has columns: only then are they one product.
fn as_one(outputs: &[Matrix], weights: &[Matrix]) -> Option<(Matrix, Matrix)> {
    let mut pairs = outputs.iter().zip(weights);
    let alike = pairs.all(|(output, weight)| output.columns() == weight.rows());
    let whole = (Matrix::over_columns(outputs)?, Matrix::over_rows(weights)?);
    alike.then_some(whole)
}

impl CudaOperations {
    /// The layers' biases side by side in the product's own type; none when no layer has one.
    fn biases(&self, layers: &[Linear<'_>], element: Element) -> Result<Option<Matrix>> {
        if layers.iter().all(|layer| layer.bias.is_none()) {
            return Ok(None);
        }
        let columns = layers.iter().map(|layer| layer.weight.rows()).sum();
        let row = self.device.zeros(element, 1, columns)?;
        let mut at = 0;
        for layer in layers {
            let columns = layer.weight.rows();
            if let Some(bias) = layer.bias {
                self.device
                    .cast(&row.narrow_columns(at, columns)?, &bias.cuda()?)?;
            }
            at += columns;
        }
        Ok(Some(row))
    }

    pub(super) fn forward(&self, x: &Tensor, layer: Linear<'_>, residual: Option<&Tensor>) -> Result<Tensor> {
        let x = x.cuda()?;
        let weight = layer.weight.cuda()?;
        let output = self.device.matrix(output_element(&x), x.rows(), weight.rows())?;
        let bias = self.biases(&[layer], output.element())?;
        let residual = residual.map(Tensor::cuda).transpose()?;
        let onto = residual.as_ref().map_or(Onto::Nothing, Onto::Residual);
        self.device.linear(&x, &weight, bias.as_ref(), onto, &output)?;
        self.tensor(output)
    }

    pub(super) fn forward_many(&self, x: &Tensor, layers: &[Linear<'_>]) -> Result<Vec<Tensor>> {
        let weights = layers
            .iter()
            .map(|layer| layer.weight.cuda())
            .collect::<Result<Vec<_>>>()?;
        let Some(weight) = Matrix::over_rows(&weights) else {
            return layers.iter().map(|layer| self.forward(x, *layer, None)).collect();
        };
        let x = x.cuda()?;
        let output = self.device.matrix(output_element(&x), x.rows(), weight.rows())?;
        let bias = self.biases(layers, output.element())?;
        self.device
            .linear(&x, &weight, bias.as_ref(), Onto::Nothing, &output)?;
        let mut at = 0;
        let mut part = |columns: usize| {
            let view = output.narrow_columns(at, columns);
            at += columns;
            self.tensor(view?)
        };
        weights.iter().map(|weight| part(weight.rows())).collect()
    }

    pub(super) fn backward_input(&self, layers: &[(&Tensor, &Tensor)]) -> Result<Tensor> {
        let (mut gradients, mut weights) = (Vec::new(), Vec::new());
        for (gradient, weight) in layers {
            gradients.push(gradient.cuda()?);
            weights.push(weight.cuda()?);
        }
        if let Some((gradient, weight)) = as_one(&gradients, &weights) {
            (gradients, weights) = (vec![gradient], vec![weight]);
        }
        let (Some(gradient), Some(weight)) = (gradients.first(), weights.first()) else {
            return Err(no_layers("linear_backward_input"));
        };
        let element = output_element(gradient);
        let grad_x = self.device.matrix(element, gradient.rows(), weight.columns())?;
        let mut onto = Onto::Nothing;
        for (gradient, weight) in gradients.iter().zip(&weights) {
            self.device
                .linear_backward_input(gradient, weight, onto, &grad_x)?;
            onto = Onto::Output;
        }
        self.tensor(grad_x)
    }

    pub(super) fn backward_weight(&self, x: &Tensor, layers: &mut [LinearGradient<'_>]) -> Result<()> {
        let x = x.cuda()?;
        let (mut outputs, mut weights) = (Vec::new(), Vec::new());
        for layer in layers.iter() {
            let output = layer.output.cuda()?;
            if let Some(bias) = &layer.bias {
                self.device.add_column_sums(&output, &bias.cuda()?)?;
            }
            outputs.push(output);
            weights.push(layer.weight.cuda()?);
        }
        if let Some((output, weight)) = as_one(&outputs, &weights) {
            (outputs, weights) = (vec![output], vec![weight]);
        }
        for (output, weight) in outputs.iter().zip(&weights) {
            self.device.linear_backward_weight(output, &x, weight)?;
        }
        Ok(())
    }
}
