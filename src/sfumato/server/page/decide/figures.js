// The figures of an answer, in words. Knows the fields of a reply of System One's form, and no DOM.

const LEAST_MASS = 0.5; // of all labels: below, the model would rather have written something else

export const percent = (share) => `${(share * 100).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1)} %`;

/** The answer in a few words. */
export function headline({ kind }, answer) {
  if (kind === 'noul') return `${answer.noul >= 0.5 ? 'yes' : 'no'}, ${percent(Math.max(answer.noul, 1 - answer.noul))}`;
  if (kind === 'choice') return answer.choice;
  const shares = Object.values(answer.probabilities); // by number of the level
  return answer.legend[shares.indexOf(Math.max(...shares))];
}

/** Whether the probabilities say little. */
export const isUnsure = (answer) => answer.x_is_label === false || answer.x_label_mass < LEAST_MASS;

/** Why the probabilities say little. */
export const advice = (answer) => `The model would rather write something else than one of these answers${
  answer.x_label_mass < LEAST_MASS ? '' : ' (in one of its reads at least)'}, so their probabilities say little.`;

/** The figures beside the probabilities: { text, title, warns }. */
export function figures(answer) {
  const { score, legend, confidence, x_label_mass: mass, x_samples: samples, x_spread: spread } = answer;
  const { x_orders: orders, x_order_spread: orderSpread } = answer;
  const list = [];
  if (answer.x_undecided) {
    list.push({
      text: `undecided: the causal mode answers ${otherOf(answer)}`, warns: true,
      title: 'The two phases of the model answer differently',
    });
  }
  if (score !== undefined) {
    const most = Object.keys(legend).length - 1;
    list.push({ text: `score ${two(score)} from 0 to ${most}`, title: 'The expected level, counted from 0' });
  }
  if (confidence !== undefined) {
    list.push({ text: `confidence ${two(confidence)}`, title: '0: all options are as probable; 1: one is certain' });
  }
  if (mass !== undefined) {
    list.push({
      text: `label mass ${two(mass)}`, warns: isUnsure(answer),
      title: 'The probability of all answers together, among everything that the model could write',
    });
  }
  list.push(samples > 1 ? {
    text: `spread ${two(spread)} over ${samples} samples`,
    title: 'The largest difference between two samples in the probability of an option',
  } : { text: '1 sample', title: 'With more samples, their spread is shown' });
  if (orders > 1) {
    list.push({
      text: `order spread ${two(orderSpread)} over ${orders} orders`,
      title: 'The largest difference between two orders of the options',
    });
  }
  return list;
}

/** What the causal mode answers: an option, a level's name, or yes or no. */
function otherOf({ legend, x_other: other }) {
  if (typeof other === 'boolean') return other ? 'yes' : 'no';
  return legend ? legend[other] : other;
}

const two = (value) => value > 0 && value < 0.005 ? '< 0.01' : value.toFixed(2);
