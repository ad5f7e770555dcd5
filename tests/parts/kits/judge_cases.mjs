// Judges what a test gives on stdin: a list of {"expected": …, "outputs": …} with the rules.
// Tensors are {type, dims, hex}; errors that JSON does not have are texts. Prints the verdicts.
const { judge } = await import(process.argv[2]);
const { fromBytes } = await import(process.argv[3]);

let text = '';
for await (const chunk of process.stdin) text += chunk;
const NUMBERS = { inf: Infinity, nan: NaN };
const cases = JSON.parse(text, (_, value) => NUMBERS[value] ?? value);
const said = cases.map(({ expected, outputs, ...rules }) => {
  const tensors = (of) =>
    Object.fromEntries(
      Object.entries(of).map(([name, { type, dims, hex }]) => [
        name, fromBytes(type, dims, Uint8Array.from(Buffer.from(hex, 'hex'))),
      ]),
    );
  return judge(tensors(expected), tensors(outputs), rules);
});
console.log(JSON.stringify(said));
